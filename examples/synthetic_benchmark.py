"""Samples per second of a training step on made-up data, as Horovod's users know it.

    hvdrun -np 2 python examples/synthetic_benchmark.py --model resnet

The batch is made once and stays in memory, so that only computing and communicating are timed.
"""

import argparse
import statistics
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hvdlite as hvd

CLASSES = 10


class MLP(nn.Sequential):
    """Three linear layers on images of 28 x 28."""

    input_shape = (1, 28, 28)

    def __init__(self) -> None:
        super().__init__(
            nn.Flatten(),
            nn.Linear(784, 700),
            nn.ReLU(),
            nn.Linear(700, 500),
            nn.ReLU(),
            nn.Linear(500, CLASSES),
        )


class Block(nn.Module):
    """relu(x + f(x)) with two convolutions in f; a 1 x 1 convolution where the shape changes."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.shortcut(x) + self.residual(x))


class ResNet(nn.Sequential):
    """A small residual network (nine convolutions on its longest path) on 32 x 32 RGB images."""

    input_shape = (3, 32, 32)

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            Block(32, 32, stride=1),
            Block(32, 64, stride=2),
            Block(64, 128, stride=2),
            Block(128, 256, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(256, CLASSES),
        )


MODELS: dict[str, type[MLP] | type[ResNet]] = {"mlp": MLP, "resnet": ResNet}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(MODELS), default="mlp")
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

    model = MODELS[args.model]().to(device)
    samples = torch.randn(args.batch_size, *model.input_shape, device=device)
    labels = torch.randint(CLASSES, (args.batch_size,), device=device)

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
