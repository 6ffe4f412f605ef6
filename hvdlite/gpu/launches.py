"""Allreduces that their caller orders: all members launch the same ones in the same order.

NCCL needs one order on all ranks. A lane has to agree on it, operation by operation. An optimizer
knows it: its buckets, one after the other, in every round. So it launches them itself, at once, on
a communicator of its own, whose order is independent of the lane's.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection

import torch

from hvdlite import _core
from hvdlite.gpu import lane_of
from hvdlite.gpu.backend import Work
from hvdlite.gpu.lane import PATIENCE_S, PAUSE_S, in_words
from hvdlite.gpu.process_group import Group
from hvdlite.gpu.transfer import Transfer
from hvdlite.world.teams.team import Team

log = logging.getLogger("hvdlite")

_ZERO = _core.ALLREDUCE, "communicator", False, _core.FLOAT32
# In these a division by a power of two before the sum gives the bits of one after it.
_WIDE = (torch.float32, torch.float64, torch.bfloat16)


class Launch:
    """An allreduce that was launched, or has failed to."""

    def __init__(self, launches: Launches, request: _core.Posting, memory: torch.Tensor) -> None:
        self._launches = launches
        self._request = request
        self._memory = memory
        self.work: Work | None = None
        # By what the sum is still to be multiplied.
        self.factor = 1.0
        self.failure: str | None = None

    def label(self) -> tuple[str, str]:
        """The kind's name, and the operation's."""
        return _core.KINDS[self._request.kind].name, self._request.name

    def wait(self) -> str | None:
        """The text of the failure; or None, and what the calling thread then queues for the device
        finds the result. Does not block the host with NCCL. May be called again."""
        work, self.work = self.work, None
        if self._launches.ended and self.failure is None:
            self.failure = f"{self._request}: its communicator has ended"
        elif work is not None:
            try:
                work.wait()
            except Exception as error:
                self.failure = f"{self._request}: {in_words(error)}"
        if self.failure is None and self.factor != 1.0:
            factor, self.factor = self.factor, 1.0
            self._memory.mul_(factor)
        return self.failure


class Launches:
    """A further communicator of the team's lane."""

    def __init__(self, team: Team, name: str) -> None:
        """name: the same on every member, and no other's of this team."""
        self._own = team.ranks[team.rank]
        self._lane = lane_of(team)
        self.devices = self._lane.devices
        self._name = name
        self._group: Group | None = None
        # The lane's operation after which all members make it.
        self._making: Transfer | None = None
        self._last: Work | None = None
        self.ended = False
        self._process = os.getpid()
        self._lane.launches.add(self)

    def open_round(self, devices: Collection[torch.device]) -> bool:
        """Launches of memory on these devices follow, until `close_round`. Whether this member can
        do them at once: if not all can, none may. Not if another optimizer's round is open here, as
        the members could launch the two in different orders. Does not block."""
        if self._group is None and not self.ended:
            self._make(next(iter(devices)))
        group, lane = self._group, self._lane
        if group is None or set(devices) != {group.device} or lane.in_round not in (None, self):
            return False
        lane.in_round = self
        return True

    def close_round(self) -> None:
        if self._lane.in_round is self:
            self._lane.in_round = None

    def _make(self, device: torch.device) -> None:
        """Has the lane make the communicator, in the order of its turns: it blocks until all
        members do, so these must make several in one order."""
        making = self._making
        if self._lane.never_launches or (making is not None and not making.poll()):
            return
        # The first time; or a member had joined when it was tried.
        zero = torch.zeros(1, device=device)
        request = _core.posting(*_ZERO, zero, zero, op=_core.SUM)
        request = request.replace(name=f"{self._name}.communicator")
        self._making = self._lane.start(request, zero, zero, then=self._made)

    def _made(self, group: Group) -> None:
        try:
            made = group.another(self.devices, self._name)
            # NCCL connects in the first operation, and blocks.
            made.start_sum(torch.zeros(1, device=group.device), average=False).wait()
            self._group = made
        except Exception as error:
            # The others learn of it by `open_round`.
            self.ended = True
            log.warning("%s: no communicator of its own: %s", self._name, in_words(error))

    def start(
        self, request: _core.Posting, memory: torch.Tensor, at_once: bool
    ) -> Launch | Transfer:
        """An allreduce of contiguous floats in place. Never raises for a failed launch: it has
        failed then, and nothing more is launched here.

        at_once: launches it here, as all members do; else the lane agrees on it first.
        """
        if not at_once:
            return self._lane.start(request, memory, memory)
        launch = Launch(self, request, memory)
        try:
            self._launch(launch, request, memory)
        except BaseException as error:
            # The other members' next launch would meet a later one of this member.
            self.end(patience_s=0.0)
            launch.failure = f"{request}: failed on rank {self._own}: {in_words(error)}"
            if not isinstance(error, Exception):
                raise
        return launch

    def _launch(self, launch: Launch, request: _core.Posting, memory: torch.Tensor) -> None:
        group = self._group
        if group is None:
            raise RuntimeError("the communicator has ended")
        if request.prescale != 1.0:
            memory.mul_(request.prescale)
        launch.factor, average = request.postscale, request.op == _core.AVERAGE
        is_exact = memory.dtype in _WIDE and not group.size & (group.size - 1)
        if average and not (is_exact and self.devices.averages):
            launch.factor, average = request.postscale / group.size, False
        launch.work = self._last = group.start_sum(memory, average)

    def end(self, patience_s: float = PATIENCE_S) -> None:
        """Ends the communicator on this member, and what is launched and not done by then. Not
        collective. Safe to call twice."""
        self.ended = True
        self.close_round()
        group, self._group = self._group, None
        if group is None or self._process != os.getpid():
            return
        deadline = time.monotonic() + patience_s
        while self._is_busy() and time.monotonic() < deadline:
            time.sleep(PAUSE_S)
        group.end()

    def _is_busy(self) -> bool:
        try:
            return self._last is not None and not self._last.is_completed()
        except RuntimeError:  # it was captured in a CUDA graph
            return False

    def __del__(self) -> None:
        self.end()
