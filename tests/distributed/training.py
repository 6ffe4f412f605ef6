"""What the tests of training on top of torch.distributed share.

The ranks train a small model in float64 beside one process that trains it on the joined batch;
then rounding hides no fault, and the parameters must agree.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

import hvdlite.distributed  # noqa: F401 - registers the backend
from tests.distributed.backend import BACKEND
from tests.harness.rank import rank_from_launcher
from tests.optimizer.models import loss_of

LIMIT_S = 40.0
LEARNING_RATE = 0.05


def in_a_group(case: Callable[..., Any]) -> Callable[..., Any]:
    """Makes case(rank, size, …) a case(folder, …) for a world of ranks, in a default group of all
    of them. They meet in a file of the folder, which has none yet."""

    @functools.wraps(case)
    def run(folder: Path, *args: Any, **kwargs: Any) -> Any:
        rank, size = rank_from_launcher(), size_from_launcher()
        dist.init_process_group(
            BACKEND,
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=LIMIT_S),
        )
        try:
            result = case(rank, size, *args, **kwargs)
            assert backends() == {BACKEND}
            return result
        finally:
            dist.destroy_process_group()

    return run


def backends() -> set[str]:
    """Of all groups that there are: what makes groups by itself may choose another one."""
    return {backend for backend, _ in distributed_c10d._world.pg_map.values()}


def size_from_launcher() -> int:
    """The number of ranks, from the environment."""
    return int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ["PMI_SIZE"])


def sgd(net: nn.Module) -> torch.optim.SGD:
    """With momentum, so that a fault in one step shows in all later ones."""
    return torch.optim.SGD(net.parameters(), lr=LEARNING_RATE, momentum=0.9)


def step(
    net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """The loss before it."""
    optimizer.zero_grad()
    loss: torch.Tensor = loss_of(net, x, y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def mean(value: torch.Tensor) -> torch.Tensor:
    """Over all ranks."""
    total = value.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def distributed_optim() -> Any:
    """torch.distributed.optim, whose import warns of its own use of torch.jit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return importlib.import_module("torch.distributed.optim")
