"""Train a small CNN on handwritten digits, on as many processes as you like.

    hvdrun -np 2 python examples/digits.py

The lines with `hvd` are all that distinguishes it from a script for one process.
"""

import argparse
import os
import sys
import time

import torch
from digits_data import DigitsNet, load_digits
from text_plot import text_plot
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from tqdm import tqdm

import hvdlite as hvd


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument(
        "--batch-size", type=int, default=64, help="images per step, over all ranks together"
    )
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate of Adam")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--expect-accuracy",
        type=float,
        default=0.0,
        metavar="PERCENT",
        help="end with exit code 1 if the test accuracy is below this",
    )
    return parser.parse_args()


def train(args: argparse.Namespace) -> tuple[DigitsNet, list[float]]:
    """The trained network, and the loss of every step averaged over the ranks."""
    torch.manual_seed(args.seed)
    digits, _ = load_digits()
    # Each rank sees its own share of the images, shuffled anew in every epoch.
    sampler = DistributedSampler(digits, hvd.size(), hvd.rank(), seed=args.seed)
    loader = DataLoader(digits, batch_size=max(1, args.batch_size // hvd.size()), sampler=sampler)

    model = DigitsNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    # From here on, backward() also averages the gradients over the ranks.
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    # All ranks start from the weights of rank 0.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    losses = []
    steps = args.epochs * len(loader)
    with tqdm(total=steps, unit="step", ncols=80, disable=hvd.rank() != 0) as bar:
        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)
            bar.set_description(f"epoch {epoch + 1}/{args.epochs}")
            for images, labels in loader:
                optimizer.zero_grad()
                loss = cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                bar.update()
    return model, hvd.allreduce(torch.tensor(losses), name="losses").tolist()


def accuracy(model: DigitsNet) -> float:
    """Per cent of the test images that are recognised; each rank looks at its share of them."""
    images, labels = load_digits()[1].tensors
    mine = slice(hvd.rank(), None, hvd.size())
    with torch.no_grad():
        hits = (model(images[mine]).argmax(dim=1) == labels[mine]).sum()
    return 100 * hvd.allreduce(hits, op=hvd.Sum, name="hits").item() / len(labels)


def main() -> int:
    args = parse_args()
    hvd.init()

    start = time.perf_counter()
    model, losses = train(args)
    seconds = time.perf_counter() - start
    percent = accuracy(model)

    if hvd.rank() == 0:
        print(text_plot(losses, f"\nTraining loss, {args.epochs} epochs"))
        print(f"\nTrained on {hvd.size()} rank(s) in {seconds:.1f} s.")
        print(f"Test accuracy: {percent:.2f} %\n")
        if "VIRTUAL_ENV" not in os.environ and sys.prefix != sys.base_prefix:
            print(f"In a new shell first: source {os.path.relpath(sys.prefix)}/bin/activate")
        print("What to try next:")
        print("  more ranks       hvdrun -np 4 python examples/digits.py")
        print("  several hosts    hvdrun -np 4 -H host1:2,host2:2 python examples/digits.py")
        print("  your own script  two lines to change: see README.md")
    return int(percent < args.expect_accuracy)


if __name__ == "__main__":
    sys.exit(main())
