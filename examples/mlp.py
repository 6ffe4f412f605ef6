"""Train an MLP of 784-700-500-10 neurons with batches of 128 images, which the ranks divide.

    hvdrun -np 2 python examples/mlp.py

Each rank takes its part of every batch, so that a step is that of one process with the whole batch:
the losses are the same on any number of ranks, but for rounding, and no learning rate changes.

It trains on MNIST where its files are in --mnist, else on scikit-learn's digits, enlarged.
"""

import argparse
import sys
from pathlib import Path

import torch
from digits_data import load_large_digits
from networks import MLP
from torch.nn.functional import cross_entropy

import hvdlite as hvd


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument(
        "--batch-size", type=int, default=128, help="images per step, over all ranks together"
    )
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate of SGD")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--mnist",
        type=Path,
        default=Path("data/MNIST/raw"),
        metavar="FOLDER",
        help="has MNIST's files (train-images-idx3-ubyte …); scikit-learn's digits otherwise",
    )
    parser.add_argument(
        "--expect-accuracy",
        type=float,
        default=0.0,
        metavar="PERCENT",
        help="end with exit code 1 if the test accuracy is below this",
    )
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    hvd.init()
    torch.manual_seed(args.seed)
    train, test = load_large_digits(args.mnist)
    images, labels = train.tensors

    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    # The gradients are added up: each rank divides its loss by the number of images of the whole
    # batch. So the parts may have different sizes.
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), op=hvd.Sum
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    order = torch.Generator().manual_seed(args.seed)  # the same on every rank
    for epoch in range(args.epochs):
        shuffled = torch.randperm(len(images), generator=order)
        loss_sum = torch.zeros(())
        for batch in shuffled.split(args.batch_size):
            mine = batch[hvd.rank() :: hvd.size()]
            optimizer.zero_grad()
            loss = cross_entropy(model(images[mine]), labels[mine], reduction="sum") / len(batch)
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach() * len(batch)
        mean = hvd.allreduce(loss_sum, op=hvd.Sum, name="loss").item() / len(images)
        if hvd.rank() == 0:
            print(f"Epoch {epoch + 1}/{args.epochs}: training loss {mean:.4f}", flush=True)

    images, labels = (tensor[hvd.rank() :: hvd.size()] for tensor in test.tensors)
    with torch.no_grad():
        hits = (model(images).argmax(dim=1) == labels).sum()
    percent = 100 * hvd.allreduce(hits, op=hvd.Sum, name="hits").item() / len(test)
    if hvd.rank() == 0:
        print(f"Test accuracy on {hvd.size()} rank(s): {percent:.2f} %")
    return int(percent < args.expect_accuracy)


if __name__ == "__main__":
    sys.exit(main())
