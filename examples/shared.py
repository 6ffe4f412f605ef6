"""Train with one copy per host of the data, the parameters and the optimizer's state, whatever the
number of its ranks.

    hvdrun -np 4 python examples/shared.py

One rank per host reads the data into memory that all its ranks have in common, read-only. The
parameters lie in such memory, too. Each rank owns a part of every gradient, has the state of that
part only, and updates it for all. How much all of this takes is printed at the end; a copy in each
rank would take the number of ranks times as much.
"""

import argparse
import sys

import torch
from digits_data import DigitsNet
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hvdlite as hvd

NUM_IMAGES = 1797
SIDE = 8


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument(
        "--batch-size", type=int, default=64, help="images per step, over all ranks together"
    )
    parser.add_argument("--copies", type=int, default=4, help="1, and copies with noise")
    parser.add_argument(
        "--expect-accuracy",
        type=float,
        default=0.0,
        metavar="PERCENT",
        help="end with exit code 1 if the test accuracy is below this",
    )
    args = parser.parse_args()
    if min(args.epochs, args.batch_size, args.copies) < 1:
        parser.error("--epochs, --batch-size and --copies must be at least 1")
    return args


def load_images(images: torch.Tensor) -> None:
    """Fills float32[copies, n, 1, 8, 8]: the scans, with noise in all copies but the first."""
    scans = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16
    noise = torch.Generator().manual_seed(0)
    for number, copy in enumerate(images):
        copy.copy_(scans)
        if number > 0:
            copy += 0.1 * torch.randn(scans.shape, generator=noise)


def load_labels(labels: torch.Tensor) -> None:
    """Fills int64[copies, n]."""
    labels.copy_(torch.tensor(load_digits().target))


def elements_of_state(optimizer: torch.optim.Optimizer) -> int:
    """Of Adam's two averages, as far as this rank has them."""
    names = ("exp_avg", "exp_avg_sq")
    return sum(state[name].numel() for state in optimizer.state.values() for name in names)


def main() -> int:
    args = parse_args()
    hvd.init()
    torch.manual_seed(0)

    # Only the lowest rank of each host runs the functions; every rank gets the same memory.
    shape = (args.copies, NUM_IMAGES)
    images = hvd.shared_tensor((*shape, 1, SIDE, SIDE), torch.float32, load_images)
    labels = hvd.shared_tensor(shape, torch.int64, load_labels)

    # The last quarter of each copy's images is for the test; these are views, not copies.
    digits = TensorDataset(images.flatten(0, 1), labels.flatten())
    is_test = torch.arange(len(digits)) % NUM_IMAGES >= NUM_IMAGES * 3 // 4
    train = Subset(digits, torch.nonzero(~is_test).flatten().tolist())

    sampler = DistributedSampler(train, hvd.size(), hvd.rank())
    loader = DataLoader(train, batch_size=max(1, args.batch_size // hvd.size()), sampler=sampler)
    model = DigitsNet()
    hvd.share_parameters(model)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), shard=True
    )
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for batch, targets in loader:
            optimizer.zero_grad()
            cross_entropy(model(batch), targets).backward()
            optimizer.step()

    # Of the scans without noise, each rank looks at its share.
    tested = torch.nonzero(is_test[:NUM_IMAGES]).flatten()[hvd.rank() :: hvd.size()]
    with torch.no_grad():
        hits = (model(images[0, tested]).argmax(dim=1) == labels[0, tested]).sum()
    total = NUM_IMAGES - NUM_IMAGES * 3 // 4
    percent = 100 * hvd.allreduce(hits, op=hvd.Sum, name="hits").item() / total
    numel = sum(param.numel() for param in model.parameters())
    held = hvd.allgather(torch.tensor([elements_of_state(optimizer)]), name="state").tolist()
    if hvd.rank() == 0:
        print(f"Trained on {hvd.size()} rank(s).")
        print(f"One copy of the data per host: {(images.nbytes + labels.nbytes) / 2**20:.1f} MiB")
        print(f"One copy of the parameters per host: {numel} elements")
        print(f"State of the optimizer, in each rank: {', '.join(map(str, held))} elements")
        print(f"Test accuracy: {percent:.2f} %")
    return int(percent < args.expect_accuracy)


if __name__ == "__main__":
    sys.exit(main())
