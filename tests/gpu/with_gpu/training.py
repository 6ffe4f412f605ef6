"""Training on all ranks beside one process that has all ranks' batches: the programs' oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import hvdlite as hvd
from tests.gpu.with_gpu.checking import DEVICE, equal_on_all_ranks

STEPS = 4
# Sums of double precision: only their order differs.
EXACT = 1e-11
Batch = tuple[torch.Tensor, torch.Tensor]
Make = Callable[[Any], torch.optim.Optimizer]


def net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """The same on every call."""
    torch.manual_seed(0)
    layers = [nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)]
    return nn.Sequential(*layers).to(DEVICE, dtype)


def batch(rank: int, rows: int = 16, dtype: torch.dtype = torch.float64) -> Batch:
    """Each rank's own."""
    generator = torch.Generator().manual_seed(1 + rank)
    x = torch.randn(rows, 32, generator=generator, dtype=torch.float64)
    y = torch.randn(rows, 8, generator=generator, dtype=torch.float64)
    return x.to(DEVICE, dtype), y.to(DEVICE, dtype)


def everyones() -> list[Batch]:
    return [batch(rank) for rank in range(hvd.size())]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def wrap(model: nn.Module, make: Make = sgd, **options: Any) -> Any:
    inner = make(model.parameters())
    return hvd.DistributedOptimizer(inner, model.named_parameters(), **options)


def loss_of(forward: Callable[..., Any], one: Batch) -> torch.Tensor:
    x, y = one
    loss: torch.Tensor = (forward(x) - y).square().mean()
    return loss


def train(
    model: nn.Module,
    optimizer: Any,
    batches: Sequence[Batch],
    steps: int = STEPS,
    forward: Callable[..., Any] | None = None,
    before_step: Callable[[], object] = lambda: None,
) -> None:
    """Steps on the mean loss of the batches."""
    for _ in range(steps):
        optimizer.zero_grad()
        for one in batches:
            (loss_of(forward or model, one) / len(batches)).backward()
        before_step()
        optimizer.step()


def assert_same(model: nn.Module, alone: nn.Module, tolerance: float = EXACT) -> None:
    """The ranks have the same parameters, and one process has them too. Collective."""
    assert equal_on_all_ranks(model.parameters()), "the ranks' parameters differ"
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        worst = (ours - theirs).abs().max().item()
        assert worst <= tolerance, f"{name} differs by {worst} from one process"


def assert_trains_as_one_process(
    make: Make = sgd, tolerance: float = EXACT, **options: Any
) -> None:
    model, alone = net(), net()
    train(model, wrap(model, make, **options), [batch(hvd.rank())])
    train(alone, make(alone.parameters()), everyones())
    assert_same(model, alone, tolerance)
