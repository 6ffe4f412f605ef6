"""Lanes: collectives on GPU tensors.

A **lane** belongs to a team, and is made at its first operation on a GPU. NCCL needs the same order
of operations on all ranks, which the lane gets from the engine: every operation is posted there
without its data, the engine compares what the ranks want, and numbers what they agree on. That
number is the operation's **turn**. See docs/design/gpu.md.

`lane` keeps the order, `transfer` is one operation, `group` runs it on a process group of torch,
`staging` takes it through host memory (`host_buffers`), `setup` decides between the two, `cuda` has
the streams.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, cast

import torch

from hvdlite.world import world
from hvdlite.world.process import gpu_pinning

if TYPE_CHECKING:
    from hvdlite.gpu.lane import Lane
    from hvdlite.world.teams.team import Team

_making = threading.Lock()


def goes_by_gpu(tensor: torch.Tensor) -> bool:
    """Whether a lane carries this tensor. Others reach the engine in host memory.

    Raises:
        ValueError: No GPU could be chosen for this rank.
    """
    if not tensor.is_cuda:
        return False
    if gpu_pinning.refusal:
        raise ValueError(gpu_pinning.refusal)
    return True


def lane_of(team: Team) -> Lane:
    """The team's lane, made on the first call. Not collective: exchanges nothing."""
    if team.lane is None:
        with _making:
            if team.lane is None:
                team.lane = _make(team)
    return cast("Lane", team.lane)


def _make(team: Team) -> Lane:
    # Imported here, as jobs without GPUs should not load it.
    from hvdlite.gpu.cuda import CudaDevices
    from hvdlite.gpu.lane import Lane
    from hvdlite.gpu.setup import connect

    config = world.current().config
    choice = config.gpu_collectives
    # NCCL adds in an order of its own.
    staged = choice == "staged" or (choice == "auto" and config.deterministic)
    how = None if staged else functools.partial(connect, choice=choice)
    return Lane(team, CudaDevices(), how)
