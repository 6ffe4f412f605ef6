"""GPU queues: collectives on GPU tensors.

A **GPU queue** belongs to a team, and is made at its first operation on a GPU. NCCL needs the same
order of operations on all ranks, which the queue gets from the engine: every operation is posted
there without its data, the engine compares what the ranks want, and numbers what they agree on.
That number is the operation's **sequence number**. See docs/design/gpu.md.

`queue` keeps the order, `transfer` is one operation, `group` runs it on a process group of torch,
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
    from hvdlite.gpu.queue import GpuQueue
    from hvdlite.world.teams.team import Team

_making = threading.Lock()


def goes_by_gpu(tensor: torch.Tensor) -> bool:
    """Whether a queue carries this tensor. Others reach the engine in host memory.

    Raises:
        ValueError: No GPU could be chosen for this rank.
    """
    if not tensor.is_cuda:
        return False
    if gpu_pinning.refusal:
        raise ValueError(gpu_pinning.refusal)
    return True


def queue_of(team: Team) -> GpuQueue:
    """The team's queue, made on the first call. Not collective: exchanges nothing."""
    if team.gpu_queue is None:
        with _making:
            if team.gpu_queue is None:
                team.gpu_queue = _make(team)
    return cast("GpuQueue", team.gpu_queue)


def _make(team: Team) -> GpuQueue:
    # Imported here, as jobs without GPUs should not load it.
    from hvdlite.gpu.cuda import CudaDevices
    from hvdlite.gpu.queue import GpuQueue
    from hvdlite.gpu.setup import connect

    config = world.current().config
    choice = config.gpu_collectives
    # NCCL adds in an order of its own.
    staged = choice == "staged" or (choice == "auto" and config.deterministic)
    how = None if staged else functools.partial(connect, choice=choice)
    return GpuQueue(team, CudaDevices(), how)
