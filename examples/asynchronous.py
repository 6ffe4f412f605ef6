"""Train on handwritten digits without waiting for the slowest process.

    hvdrun -np 4 --servers 1 python examples/asynchronous.py

Three processes are workers: each sends its gradients to the server, which holds the parameters, and
goes on. Together they make --steps steps, the faster ones more of them. See what that brings where
one worker is slow:

    hvdrun -np 4 --servers 1 python examples/asynchronous.py --slow 0.05
    hvdrun -np 4 --servers 1 python examples/asynchronous.py --slow 0.05 --allreduce

Without --servers, on one host, the workers share their parameters and change them in place.
"""

import argparse
import sys
import time

import torch
from digits_data import DigitsNet, load_digits
from torch.nn.functional import cross_entropy

import hvdlite as hvd


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600, help="of all workers together")
    parser.add_argument("--batch-size", type=int, default=32, help="images per step and worker")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate of SGD")
    parser.add_argument(
        "--max-staleness",
        type=int,
        metavar="S",
        help="no worker is more steps ahead of the slowest",
    )
    parser.add_argument(
        "--slow", type=float, default=0.0, metavar="SECONDS", help="each step of the last worker"
    )
    parser.add_argument("--allreduce", action="store_true", help="wait for all, for comparison")
    parser.add_argument(
        "--expect-loss", type=float, metavar="LOSS", help="exit code 1 if the loss stays above it"
    )
    args = parser.parse_args()
    if args.allreduce and args.max_staleness is not None:
        parser.error("--max-staleness has no effect with --allreduce: all workers wait for all")
    return args


def main() -> int:
    args = parse_args()
    hvd.init()  # a server serves in here, and ends when the workers have ended
    torch.manual_seed(0)
    images, labels = load_digits()[0].tensors
    model = DigitsNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    if args.allreduce:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    else:
        optimizer = hvd.AsyncOptimizer(
            optimizer, model.named_parameters(), max_staleness=args.max_staleness
        )

    draw = torch.Generator().manual_seed(hvd.rank())
    start = time.perf_counter()
    own_steps = all_steps = 0
    while all_steps < args.steps:
        batch = torch.randint(len(images), (args.batch_size,), generator=draw)
        if hvd.rank() == hvd.size() - 1:
            time.sleep(args.slow)
        optimizer.zero_grad()
        cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        own_steps += 1
        if args.allreduce:
            all_steps += hvd.size()
        else:
            all_steps = sum(optimizer.counters()["steps"])
    hvd.join()  # the others do not wait for this worker any more
    seconds = time.perf_counter() - start

    by_worker = hvd.allgather_object(own_steps)
    if not args.allreduce:
        optimizer.pull()
    with torch.no_grad():
        loss = cross_entropy(model(images), labels).item()
    if hvd.rank() == 0:
        print(f"Steps of each worker: {by_worker}, in {seconds:.1f} s")
        print(f"Training loss: {loss:.4f}")
    return int(args.expect_loss is not None and loss > args.expect_loss)


if __name__ == "__main__":
    sys.exit(main())
