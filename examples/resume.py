"""Stop a training run at any time and go on where it stood.

    hvdrun -np 2 python examples/resume.py --checkpoint digits.pt --epochs 6 --stop-after 2
    hvdrun -np 2 python examples/resume.py --checkpoint digits.pt --epochs 6

Only rank 0 writes and reads the checkpoint; the others get everything from it by broadcast, so
that no shared file system is needed. The result is that of a run without interruption, bit for
bit: compare the digests of the parameters that are printed at the end.
"""

import argparse
import hashlib
import os
from pathlib import Path

import torch
from digits_data import DigitsNet, load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import hvdlite as hvd


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, default=Path("digits.pt"), metavar="FILE")
    parser.add_argument("--epochs", type=int, default=6, help="epochs of the whole training")
    parser.add_argument(
        "--stop-after", type=int, metavar="N", help="stop after N epochs of this run"
    )
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and rank")
    parser.add_argument("--lr", type=float, default=0.003)
    return parser.parse_args()


def save(path: Path, state: dict[str, object]) -> None:
    """Writes a checkpoint that is either complete or not there: a new file takes the old name."""
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def digest(model: torch.nn.Module) -> str:
    """A short name for these parameters: equal for equal bits, different otherwise."""
    hashed = hashlib.sha256()
    for parameter in model.parameters():
        hashed.update(parameter.detach().numpy().tobytes())
    return hashed.hexdigest()[:16]


def main() -> None:
    args = parse_args()
    hvd.init()
    torch.manual_seed(0)
    digits, _ = load_digits()
    # The order of the images follows from the epoch alone: it needs no place in the checkpoint.
    sampler = DistributedSampler(digits, hvd.size(), hvd.rank())
    loader = DataLoader(digits, batch_size=args.batch_size, sampler=sampler)

    model = DigitsNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    first_epoch = 0
    if hvd.rank() == 0 and args.checkpoint.exists():
        state = torch.load(args.checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epoch"]
    # Rank 0 knows where to go on and has the optimizer's moments; now all ranks do.
    first_epoch = hvd.broadcast_object(first_epoch, root_rank=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    last_epoch = args.epochs
    if args.stop_after is not None:
        last_epoch = min(last_epoch, first_epoch + args.stop_after)
    for epoch in range(first_epoch, last_epoch):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        mean = hvd.allreduce(loss.detach(), name="loss").item()
        if hvd.rank() == 0:
            print(f"Epoch {epoch + 1}/{args.epochs}: loss of the last step {mean:.4f}", flush=True)
            save(
                args.checkpoint,
                {
                    "epoch": epoch + 1,
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                },
            )

    if hvd.rank() == 0:
        print(f"Trained {last_epoch} of {args.epochs} epochs, {last_epoch - first_epoch} now.")
        print(f"Digest of the parameters: {digest(model)}")


if __name__ == "__main__":
    main()
