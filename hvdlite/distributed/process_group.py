"""The process group: who belongs to it, what it is called, its end."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from hvdlite.distributed import cuda_calls, futures, monitored_barrier
from hvdlite.distributed.collectives import Collectives
from hvdlite.distributed.errors import CollectiveError, OperationTimeoutError
from hvdlite.world.teams.groups import close_group
from hvdlite.world.teams.team import Team

NAME = "hvdlite"

# Those that are not closed and in use.
_open: weakref.WeakSet[HvdliteProcessGroup] = weakref.WeakSet()

_CPU = torch.device("cpu")
_CUDA = torch.device("cuda")


# Torch's type hints lack members that the class has.
_Base: Any = dist.ProcessGroup


class HvdliteProcessGroup(Collectives, _Base):  # type: ignore[misc]
    """A group of ranks with an engine of its own for tensors in host memory; NCCL serves CUDA
    tensors, from the first one on.

    name: torch's. called: what its operations are called; the same on all members.
    make_nccl: makes NCCL's backend of the same ranks; None where there is none.
    make_part: makes a group of some of these ranks, given by their numbers in this group.
    """

    def __init__(
        self,
        team: Team,
        timeout_s: float,
        store: Store | None,
        name: str,
        called: str,
        make_nccl: Callable[[], Any] | None = None,
        make_part: Callable[[Sequence[int], str, float], HvdliteProcessGroup] | None = None,
    ) -> None:
        super().__init__(team.rank, team.size)
        self.team = team
        self.timeout_s = timeout_s
        # The name of the backend that was asked for: "gloo" where that means hvdlite.
        self.label = NAME
        self._store = store
        self._name = name
        self._called = called
        self._desc = "undefined"
        self._make_nccl = make_nccl
        self._make_part = make_part
        self._nccl: Any = None
        self._calls: cuda_calls.Calls | None = None
        self._closed = False
        _open.add(self)
        # Numbers the collectives; those of futures' callbacks have names of their own.
        self._numbers = itertools.count()
        self._barriers = itertools.count(1)

    def next_name(self) -> str:
        """What the group's next collective is posted as."""
        return futures.next_name(self._called) or f"{self._called}.{next(self._numbers)}"

    def overdue(self, error: TimeoutError) -> OperationTimeoutError:
        """Ends the group after an operation took longer than the group's timeout: on all members
        what is pending fails. Returns the error to raise."""
        text = f"{error} (the group's timeout of {self.timeout_s:g} s is over)"
        self.team.engine.give_up(text)
        return OperationTimeoutError(f"Timed out : {text}")

    def cuda(self) -> Any:
        """NCCL's backend of this group.

        Raises:
            CollectiveError: torch has no NCCL here, or no GPU.
        """
        if self._nccl is None:
            if self._make_nccl is None:
                raise CollectiveError(
                    "a CUDA tensor was passed to a process group of hvdlite, which gives it to "
                    "NCCL; but torch finds no GPU or no NCCL in this process"
                )
            self._nccl = self._make_nccl()
            self._register_backend(_CUDA, dist.ProcessGroup.BackendType.NCCL, self._nccl)
            self._calls = cuda_calls.begin(self.team, self._nccl, self._store, self._name)
        return self._nccl

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        timeout_s = self.timeout_s if timeout is None else timeout.total_seconds()
        monitored_barrier.run(self.team, next(self._barriers), timeout_s, wait_all_ranks)

    # What the group is called. C++ asks by the names in capitals.

    def getBackendName(self) -> str:
        """For C++: where it is Gloo's, DDP looks for Gloo's own backend, and fails."""
        return NAME

    def name(self) -> str:
        return self.label

    def rank(self) -> int:
        return self.team.rank

    def size(self) -> int:
        return self.team.size

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    _get_backend_name = name
    getRank, getSize = rank, size
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU] if self._make_nccl is None else [_CPU, _CUDA]

    def _get_backend(self, device: torch.device) -> Any:
        """The group itself serves tensors in host memory."""
        kind = torch.device(device).type
        if kind == "cpu":
            return self
        if kind == "cuda" and self._make_nccl is not None:
            return self.cuda()
        raise RuntimeError(f"No backend type associated with device type {kind}")

    def get_group_store(self) -> Any:
        return self._store

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        return None

    def _get_sequence_number_for_group(self) -> int:
        return int(next(copy.copy(self._numbers)))

    def _set_sequence_number_for_group(self) -> None:
        """Groups number their operations from the start."""

    # What c10d asks of a backend.

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def _start_coalescing(self, device: torch.device) -> None:
        """Each operation inside starts at its call."""
        if torch.device(device).type == "cuda":
            self.cuda()._start_coalescing()

    def _end_coalescing(self, device: torch.device) -> Any:
        is_cuda = torch.device(device).type == "cuda"
        return self.cuda()._end_coalescing() if is_cuda else None

    def set_timeout(self, timeout: timedelta) -> None:
        """Of operations that are called from now on."""
        self.timeout_s = timeout.total_seconds()
        if self._nccl is not None:
            self._nccl._set_default_timeout(timeout)

    _set_default_timeout = set_timeout

    # Parts, and the end.

    def split(
        self, ranks: Sequence[int], timeout: timedelta | None = None, name: str = "", desc: str = ""
    ) -> HvdliteProcessGroup | None:
        """A group of some of these ranks, in this order; None on the others, which need not call
        it.

        ranks: by their numbers in this group.
        """
        if self.team.rank not in ranks or self._make_part is None:
            return None
        limit_s = self.timeout_s if timeout is None else timeout.total_seconds()
        part = self._make_part(ranks, name or f"{self._name}.part", limit_s)
        part.setGroupDesc(desc or f"{self._desc}:split")
        return part

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> HvdliteProcessGroup | None:
        return self.split(new_ranks, timeout, group_name or "", group_desc or "")

    splitGroup = split_group

    def shutdown(self) -> None:
        """Leaves the group: what is pending fails. Not collective."""
        self._leave("shutdown")

    def abort(self) -> None:
        self._leave("abort")

    def _leave(self, how: str) -> None:
        if self._closed:
            return
        self._closed = True
        if self._calls is not None:
            cuda_calls.stop({self._calls})
        close_group(self.team)
        _open.discard(self)
        if not _open:
            futures.end()
        if self._nccl is not None:
            getattr(self._nccl, how)()
