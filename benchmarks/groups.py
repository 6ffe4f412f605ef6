"""Process groups of torch.distributed that are compared, all in the same processes.

Gloo takes part twice: on the cores that hvdrun has bound its rank to, and free to run on any core.
Its threads stay where the thread that creates the group was then.
"""

import functools
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.figures import ANY_CORE, GLOO, IDLE, OURS

BACKEND_OF_IDLE = "idle"


@dataclass(frozen=True)
class Group:
    """A process group over all ranks, the cores of the thread that calls it, and those of the
    rank."""

    group: dist.ProcessGroup
    cores: frozenset[int]
    own: frozenset[int]

    def enter(self) -> None:
        """Between the barrier and a timing of this group. So a thread that is free to run on any
        core has left the barrier on its rank's own."""
        os.sched_setaffinity(0, self.cores)

    def leave(self) -> None:
        """After the timing: back to the cores of this rank."""
        os.sched_setaffinity(0, self.own)


@functools.cache
def make_groups() -> dict[str, Group]:
    """By contender; among them a group that does nothing. Collective in its first call; torch's
    default group is there, of whatever backend. They stay as long as that: DTensor remembers the
    first of several equal meshes, and takes its group for all."""
    own = frozenset(os.sched_getaffinity(0))
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    every = frozenset(os.sched_getaffinity(0))
    free = Group(dist.new_group(backend="gloo"), every, own)
    os.sched_setaffinity(0, own)
    groups = {
        OURS: Group(dist.new_group(backend="hvdlite"), own, own),
        GLOO: Group(dist.new_group(backend="gloo"), own, own),
    }
    if every != own:
        groups[ANY_CORE] = free
    dist.Backend.register_backend(BACKEND_OF_IDLE, IdleGroup.create, devices=["cpu"])
    groups[IDLE] = Group(dist.new_group(backend=BACKEND_OF_IDLE), own, own)
    return groups


def busy_groups() -> dict[str, Group]:
    return {name: group for name, group in make_groups().items() if name != IDLE}


class Done(dist.Work):
    """A piece of work that was over at once."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self._future.set_result(tensors)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._future


# Torch's type hints ask for overloads of operations that are not called here.
Base: Any = dist.ProcessGroup


class IdleGroup(Base):  # type: ignore[misc]
    """Does nothing: no communication can be faster than this. What it costs is torch's own."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._name = self._description = ""

    @classmethod
    def create(cls, store: object, rank: int, size: int, timeout: object) -> "IdleGroup":
        return cls(rank, size)

    def getBackendName(self) -> str:
        return BACKEND_OF_IDLE

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)
    _device_types = property(lambda self: [torch.device("cpu")])

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Done:
        return Done(tensors)

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Done:
        return Done(tensors)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None
    ) -> Done:
        """DDP compares the shapes of all ranks' parameters by it when it is made."""
        for output, source in zip(outputs, inputs, strict=True):
            for tensor in output:
                tensor.copy_(source)
        return Done([tensor for output in outputs for tensor in output])

    def _allgather_base(self, output: Tensor, source: Tensor, options: Any = None) -> Done:
        return Done([output])

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, options: Any = None) -> Done:
        return Done([output])

    # As torch has called them since 2.13.
    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base

    def barrier(self, options: Any = None) -> Done:
        return Done([])
