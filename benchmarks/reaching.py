"""Times how long training takes to reach the loss of examples/asynchronous.py, where one of the
workers is slow: with and without waiting for it.

The network, the data, the batches and the learning rate are the example's. What waits for all
workers makes fewer steps with the mean of their gradients, which bears a greater learning rate: it
takes part with both.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hvdlite as hvd
from benchmarks.figures import OURS, SCALED, SYNCHRONOUS
from examples.digits_data import DigitsNet, load_digits

BATCH, RATE = 32, 0.1
LOOK_S = 0.1  # how often a worker computes the loss of all images
LIMIT_S = 120.0

Images = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Way:
    """wrap: makes an optimizer one of all workers. together: they make each step together."""

    wrap: Callable[[torch.optim.Optimizer], Any]
    rate: float
    together: bool


def distributed(optimizer: torch.optim.Optimizer) -> Any:
    return hvd.DistributedOptimizer(optimizer, check_start=False)


def contenders() -> dict[str, Way]:
    return {
        SYNCHRONOUS: Way(distributed, RATE, together=True),
        SCALED: Way(distributed, RATE * hvd.size(), together=True),
        OURS: Way(hvd.AsyncOptimizer, RATE, together=False),
    }


def batches(data: Images, seed: int) -> Iterator[Images]:
    images, labels = data
    draw = torch.Generator().manual_seed(seed)
    while True:
        chosen = torch.randint(len(images), (BATCH,), generator=draw)
        yield images[chosen], labels[chosen]


def loss_of(model: nn.Module, data: Images) -> float:
    images, labels = data
    with torch.no_grad():
        return cross_entropy(model(images), labels).item()


def train(way: Way, loss: float, compute_s: float) -> float:
    """The seconds until this worker's parameters have this loss on all images. Collective.

    Workers that make every step together find it after the same one, as they have the same
    parameters.
    """
    data: Any = load_digits()[0].tensors
    torch.manual_seed(0)
    model = DigitsNet()
    optimizer = way.wrap(torch.optim.SGD(model.parameters(), lr=way.rate))
    hvd.barrier()
    begin = looked = time.monotonic()
    for images, labels in batches(data, hvd.rank()):
        time.sleep(compute_s)
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
        now = time.monotonic()
        if way.together or now - looked > LOOK_S:
            looked = now
            if loss_of(model, data) <= loss:
                break
        if now - begin > LIMIT_S:
            raise TimeoutError(f"worker {hvd.rank()} has not reached the loss {loss:g}")
    seconds = time.monotonic() - begin
    hvd.barrier()  # the others still train on the server's parameters
    return seconds


def time_to_loss(loss: float, compute_s: float) -> dict[str, float]:
    """The slowest worker's seconds, by contender. Collective. compute_s: of this worker's step."""
    found = {}
    for name, way in contenders().items():
        own = torch.tensor(train(way, loss, compute_s), dtype=torch.float64)
        found[name] = float(hvd.allreduce(own, op=hvd.Max))
    return found
