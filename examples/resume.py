"""Stop a training run at any time and go on where it stood.

    hvdrun -np 2 python examples/resume.py --checkpoints digits --epochs 6 --stop-after 100
    hvdrun -np 2 python examples/resume.py --checkpoints digits --epochs 6

Only rank 0 writes and reads the checkpoints; the others get everything from it by broadcast, so
that no shared file system is needed. The result is that of a run without interruption, bit for
bit: compare the digests of the parameters that are printed at the end. With another number of
ranks, each epoch still has each sample once.
"""

import argparse
import hashlib
from pathlib import Path

import torch
from digits_data import DigitsNet, load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import hvdlite as hvd
from hvdlite.recipes import Checkpointer, DistributedSampler


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoints", type=Path, default=Path("digits"), metavar="FOLDER")
    parser.add_argument("--epochs", type=int, default=6, help="epochs of the whole training")
    parser.add_argument("--stop-after", type=int, metavar="N", help="stop after step N")
    parser.add_argument("--save-every", type=int, default=50, metavar="N", help="steps")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and rank")
    parser.add_argument("--lr", type=float, default=0.003)
    return parser.parse_args()


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
    # The order of the images is saved with the rest: which of them the epoch has used.
    sampler = DistributedSampler(digits)
    loader = DataLoader(digits, batch_size=args.batch_size, sampler=sampler)

    model = DigitsNet()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    with Checkpointer(
        args.checkpoints, model=model, optimizer=optimizer, sampler=sampler
    ) as checkpointer:
        begin = checkpointer.restore() or 0
        step = train(args, begin, model, optimizer, sampler, loader, checkpointer)
        checkpointer.save(step)

    if hvd.rank() == 0:
        print(f"Trained {step} steps, {step - begin} now.")
        print(f"Digest of the parameters: {digest(model)}")


def train(
    args: argparse.Namespace,
    step: int,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    sampler: DistributedSampler[int],
    loader: DataLoader[tuple[torch.Tensor, ...]],
    checkpointer: Checkpointer,
) -> int:
    """Goes on behind that step; the number of steps at the end."""
    for epoch in range(sampler.epoch, args.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            if step == args.stop_after:
                return step
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            sampler.advance(len(labels))
            step += 1
            if step % args.save_every == 0:
                checkpointer.save(step)
                mean = hvd.allreduce(loss.detach(), name="loss").item()
                if hvd.rank() == 0:
                    print(f"Step {step} in epoch {epoch + 1}: loss {mean:.4f}", flush=True)
    return step


if __name__ == "__main__":
    main()
