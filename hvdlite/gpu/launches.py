"""Allreduces that their caller orders: all members launch the same ones in the same order.

NCCL needs one order on all ranks. A lane has to agree on it, operation by operation. An optimizer
knows it: its buckets, one after the other, in every round. So it launches them itself, at once, on
a communicator of its own, whose order is independent of the lane's.
"""

from __future__ import annotations

import logging
import os
import time

import torch

from hvdlite import _core
from hvdlite.gpu import lane_of
from hvdlite.gpu.devices import Mark, Track
from hvdlite.gpu.lane import LONGEST_PAUSE_S, PATIENCE_S, in_words, queue
from hvdlite.gpu.process_group import Group
from hvdlite.gpu.transfer import Transfer
from hvdlite.world.teams.team import Team

log = logging.getLogger("hvdlite")

_ZERO = _core.ALLREDUCE, "communicator", False, _core.FLOAT32


class Launches:
    """A further communicator of the team's lane."""

    def __init__(self, team: Team, name: str) -> None:
        """name: the same on every member, and no other's of this team."""
        self._own = team.ranks[team.rank]
        self._lane = lane_of(team)
        self._name = name
        self._group: Group | None = None
        # The lane's operation after which all members make it.
        self._making: Transfer | None = None
        self._tracks: dict[torch.device, Track] = {}
        self._last: Mark | None = None
        self._ended = False
        self._process = os.getpid()
        self._lane.launches.add(self)

    def open_round(self, device: torch.device) -> bool:
        """Launches follow until `close_round`. Whether this member can do them at once: if not all
        can, none may. Not if another optimizer's round is open here, as the members could launch
        the two in different orders. Does not block."""
        if self._group is None and not self._ended:
            self._make(device)
        lane = self._lane
        if self._group is None or lane.in_round not in (None, self):
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
        if making is not None and (not making.poll() or self._lane.never_launches):
            return
        # The first time; or a member had joined when it was tried.
        zero = torch.zeros(1, device=device)
        request = _core.posting(*_ZERO, zero, zero, op=_core.SUM)
        request = request.replace(name=f"{self._name}.communicator")
        self._making = self._lane.start(request, zero, zero, then=self._made)

    def _made(self, group: Group) -> None:
        try:
            made = group.another(self._lane.devices, self._name)
            # NCCL connects in the first operation, and blocks.
            zero = torch.zeros(1, device=group.device)
            made.allreduce_(zero, _core.posting(*_ZERO, zero, zero, op=_core.SUM))
            self._group = made
        except Exception as error:
            # The others learn of it by `open_round`.
            self._ended = True
            log.warning("%s: no communicator of its own: %s", self._name, in_words(error))

    def start(self, request: _core.Posting, memory: torch.Tensor, at_once: bool) -> Transfer:
        """An allreduce of contiguous memory in place. Never raises for a failed launch: the
        transfer has failed then, and nothing more is launched here.

        at_once: launches it here, as all members do; else the lane agrees on it first.
        """
        if not at_once:
            return self._lane.start(request, memory, memory)
        transfer = Transfer(self._lane, request, memory, memory, self._lane.devices.ready(memory))
        try:
            if self._group is None:
                raise RuntimeError("the communicator has ended")
            queue(self._group, transfer, self._track)
            self._last = transfer.done
            transfer.end(None)
        except BaseException as error:
            # The other members' next launch would meet a later one of this member.
            self.end(patience_s=0.0)
            transfer.end(f"{request}: failed on rank {self._own}: {in_words(error)}")
            if not isinstance(error, Exception):
                raise
        return transfer

    def end(self, patience_s: float = PATIENCE_S) -> None:
        """Ends the communicator on this member, and what is launched and not done by then. Not
        collective. Safe to call twice."""
        self._ended = True
        self.close_round()
        group, self._group = self._group, None
        if group is None or self._process != os.getpid():
            return
        deadline = time.monotonic() + patience_s
        while self._last is not None and not self._last.query() and time.monotonic() < deadline:
            time.sleep(LONGEST_PAUSE_S)
        group.end()

    def __del__(self) -> None:
        self.end()

    def _track(self, device: torch.device) -> Track:
        track = self._tracks.get(device)
        if track is None:
            track = self._tracks[device] = self._lane.devices.track(device)
        return track
