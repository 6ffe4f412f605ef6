"""Allreduces that their caller orders: all members launch the same ones in the same order.

NCCL needs one order on all ranks. A queue has to agree on it, operation by operation. An optimizer
knows it: its buckets, one after the other, in every round. So it launches them itself, at once, on
a communicator of its own, whose order is independent of the queue's.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Collection

import torch

from hvdlite import _core
from hvdlite.gpu import queue_of
from hvdlite.gpu.backend import Work
from hvdlite.gpu.process_group import Group
from hvdlite.gpu.queue import PATIENCE_S, PAUSE_S, in_words
from hvdlite.gpu.row_counts import gather_bytes
from hvdlite.gpu.transfer import Transfer
from hvdlite.own_names import own_name, words_of
from hvdlite.world.teams.team import Team

log = logging.getLogger("hvdlite")

# In these a division by a power of two before the sum gives the bits of one after it.
_WIDE = (torch.float32, torch.float64, torch.bfloat16)


class Launch:
    """An allreduce that was launched, or has failed to."""

    def __init__(self, launches: Launches, request: _core.Posting, memory: torch.Tensor) -> None:
        self._launches = launches
        self._request = request
        self._memory = memory
        self.work: Work | None = None
        # By what the sum is still to be multiplied; and the result of that.
        self.factor = 1.0
        self._scaled: list[torch.Tensor] = []
        self.failure: str | None = None

    def label(self) -> tuple[str, str]:
        """The kind's name, and the operation's."""
        return _core.KINDS[self._request.kind].name, self._request.name

    def wait(self) -> str | None:
        """The text of the failure; or None, and what the calling thread then queues for the device
        finds the result. Does not block the host with NCCL. May be called again."""
        if self._launches.ended and self.failure is None:
            self.failure = f"{self._request}: its communicator has ended"
        elif self.work is not None:
            try:
                self.work.wait()
            except Exception as error:
                self.failure = f"{self._request}: {in_words(error)}"
            self.work = None
        if self.failure is None and self.factor != 1.0 and not self._scaled:
            # One call into C multiplies and notes it: no signal's exception comes between.
            self._scaled.extend(map(torch.Tensor.mul_, (self._memory,), (self.factor,)))
        return self.failure


class Launches:
    """A further communicator of the team's queue."""

    def __init__(self, team: Team, name: str) -> None:
        """name: the same on every member, and no other's of this team."""
        self._group: Group | None = None
        self._process = os.getpid()
        self.ended = False
        self._last: Work | None = None
        # The queue's operation after which all members make it.
        self._making: Transfer | None = None
        self._team = team
        self._name = name
        self._queue = queue_of(team)
        self.devices = self._queue.devices
        self._queue.launches.add(self)

    def open_round(self, devices: Collection[torch.device]) -> bool:
        """Launches of memory on these devices follow, until `close_round`. Whether this member can
        do them at once: if not all can, none may. Not if another optimizer's round is open here, as
        the members could launch the two in different orders. Does not block."""
        group, queue = self._group, self._queue
        if self.ended or group is None or set(devices) != {group.device}:
            return False
        if queue.in_round is not None and queue.in_round() not in (None, self):
            return False
        queue.in_round = weakref.ref(self)
        return True

    def close_round(self) -> None:
        queue = self._queue
        if queue.in_round is not None and queue.in_round() is self:
            queue.in_round = None

    def make(self, device: torch.device) -> None:
        """Has the queue make the communicator, unless that is done: in the order of its numbers, as
        it blocks until all members do, so these must make several in one order. Every member calls
        it in the same rounds. Does not block."""
        making = self._making
        if self.ended or self._group is not None or self._queue.never_launches:
            return
        # It was tried, and a member had joined.
        if making is not None and not making.poll():
            return
        zero = torch.zeros(1, device=device)
        request = _core.posting(
            *(_core.ALLREDUCE, self._part("communicator"), False, _core.FLOAT32, zero, zero),
            op=_core.SUM,
        )
        self._making = self._queue.start(request, zero, zero, then=self._made)

    def _made(self, group: Group) -> None:
        made, failure = None, ""
        try:
            made = group.another(self.devices, self._name)
            # NCCL connects in the first operation, and blocks.
            made.start_sum(torch.zeros(1, device=group.device), average=False).wait()
        except Exception as error:
            failure = f"rank {self._own()}: {in_words(error)}"
        failures = gather_bytes(self._team, self._part("made"), failure.encode())
        failure = next((text.decode() for text in failures if text), "")
        if failure or self.ended:
            self.ended = True
            if made is not None:
                made.end()
            if self._team.rank == 0 and failure:
                log.warning("%s has no communicator of its own: %s", words_of(self._name), failure)
        else:
            self._group = made

    def _part(self, part: str) -> str:
        return own_name(self._name, part, "the making of an NCCL communicator for {}")

    def _own(self) -> int:
        return self._team.ranks[self._team.rank]

    def start(
        self, request: _core.Posting, memory: torch.Tensor, at_once: bool
    ) -> Launch | Transfer:
        """An allreduce of contiguous floats in place. Never raises for a failed launch: it has
        failed then, and nothing more is launched here.

        at_once: launches it here, as all members do; else the queue agrees on it first.
        """
        if not at_once:
            return self._queue.start(request, memory, memory)
        launch = Launch(self, request, memory)
        try:
            self._launch(launch, request, memory)
            return launch
        except BaseException as error:
            # The other members' next launch would meet a later one of this member.
            self.end(patience_s=0.0)
            launch.failure = f"{request}: failed on rank {self._own()}: {in_words(error)}"
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
        if self._process != os.getpid():
            return  # in a forked child the group has no threads, and stays as it is
        self.ended = True
        self.close_round()
        group, self._group = self._group, None
        deadline = time.monotonic() + patience_s
        while group is not None and self._is_busy() and time.monotonic() < deadline:
            time.sleep(PAUSE_S)
        if group is not None:
            group.end()

    def _is_busy(self) -> bool:
        try:
            return self._last is not None and not self._last.is_completed()
        except RuntimeError:  # it was captured in a CUDA graph
            return False

    def __del__(self) -> None:
        if self._group is None:
            return
        if self._process != os.getpid() or self._is_busy():
            # Ending it now could end what other members still wait for.
            self._queue.left_over.append(self._group)
        else:
            self.end(patience_s=0.0)
