"""Samples per second of a training step on made-up data, as Horovod's users know it.

    hvdrun -np 2 python examples/synthetic_benchmark.py --model resnet

The batch is made once and stays in memory, so that only computing and communicating are timed.
"""

import argparse
import statistics
import time

import torch
from networks import MEASURED
from torch.nn.functional import cross_entropy

import hvdlite as hvd


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(MEASURED), default="mlp")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per step and rank")
    parser.add_argument("--num-warmup-batches", type=int, default=10, help="steps not timed")
    parser.add_argument("--num-batches-per-iter", type=int, default=10, help="steps per timing")
    parser.add_argument("--num-iters", type=int, default=10, help="timings, at least 2")
    parser.add_argument(
        "--fp16-allreduce", action="store_true", help="send the gradients as 16-bit floats"
    )
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    hvd.init()
    use_cuda = torch.cuda.is_available() and not args.no_cuda
    device = torch.device("cuda" if use_cuda else "cpu")  # init has chosen this rank's GPU

    make_model, image_shape = MEASURED[args.model]
    model = make_model().to(device)
    samples = torch.randn(args.batch_size, *image_shape, device=device)
    labels = torch.randint(10, (args.batch_size,), device=device)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    def train_steps(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            cross_entropy(model(samples), labels).backward()
            optimizer.step()
        if use_cuda:
            torch.cuda.synchronize()  # the steps were only queued until here

    def log(text: str) -> None:
        if hvd.rank() == 0:
            print(text, flush=True)

    log(f"Model: {args.model}, {sum(p.numel() for p in model.parameters()):,} parameters")
    log(f"Batch size: {args.batch_size} per rank")
    log(f"Ranks: {hvd.size()}, device of rank 0: {device.type}")

    log("Warming up ...")
    train_steps(args.num_warmup_batches)

    log("Timing ...")
    rates = []
    for iteration in range(args.num_iters):
        start = time.perf_counter()
        train_steps(args.num_batches_per_iter)
        seconds = time.perf_counter() - start
        rates.append(args.batch_size * args.num_batches_per_iter / seconds)
        log(f"Iteration {iteration}: {rates[-1]:.1f} samples/s per rank")

    mean, spread = statistics.mean(rates), 1.96 * statistics.stdev(rates)
    log(f"Samples/s per rank: {mean:.1f} +- {spread:.1f}")
    log(
        f"Total samples/s on {hvd.size()} rank(s): {hvd.size() * mean:.1f} "
        f"+- {hvd.size() * spread:.1f}"
    )


if __name__ == "__main__":
    main()
