"""Sending and receiving: matched by the sender and the tag, outside the numbering."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hvdlite.distributed import spans
from hvdlite.distributed.arguments import filling, movable, single
from hvdlite.distributed.errors import OperationTimeoutError
from hvdlite.distributed.work import OperationWork
from hvdlite.sites import site
from hvdlite.world.teams.team import Team

Tensor = torch.Tensor

ANY = -1

# They wait for what they have called: nobody else needs to drive it.
_SEND = inspect.unwrap(dist.send).__code__
_RECV = inspect.unwrap(dist.recv).__code__


class MessageWork(OperationWork):
    """A send or a receive. One that has not met its counterpart in time is withdrawn: it never
    will, the group stays usable, and a later receive gets the message."""

    __slots__ = ()

    def _await(self, limit_s: float, own: bool) -> None:
        try:
            super()._await(limit_s, True)
        except OperationTimeoutError as error:
            if self._operation.withdraw():
                with self._lock:
                    self._error, self._done, self._finish = error, True, None
                raise
            if self._operation.poll():
                self._end(self._operation.wait())
            elif own:
                raise
            else:  # the data has begun to move, and stands still
                raise self._group.overdue(TimeoutError(str(error))) from None


class ReceiveWork(MessageWork):
    """A receive, which knows who has sent."""

    __slots__ = ()

    def source_rank(self) -> int:
        """The sender's number in the group. Blocks until it is known."""
        self.wait()
        return int(self._operation.rows()[0])

    _source_rank = source_rank


class PointToPoint:
    """What `HvdliteProcessGroup` inherits; it provides the attributes."""

    team: Team
    timeout_s: float
    label: str
    cuda: Callable[[], Any]
    overdue: Callable[[TimeoutError], OperationTimeoutError]

    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> Any:
        tensor = single("send", tensors)
        if not tensor.is_cpu:
            return self.cuda().send(tensors, to, tag)
        flat = movable("send", tensor)
        span = spans.begin(self.label, "send", [tensor])
        wake = sys._getframe(1).f_code is not _SEND
        operation = self.team.engine.send(flat, to, tag, site(2), wake)
        return MessageWork(self, operation, [tensor], None, self.timeout_s, span)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> Any:
        tensor = single("recv", tensors)
        if not tensor.is_cpu:
            return self.cuda().recv(tensors, source, tag)
        return self._receive(tensor, source, tag, "recv")

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Any:
        tensor = single("recv", tensors)
        if not tensor.is_cpu:
            return self.cuda().recv_anysource(tensors, tag)
        return self._receive(tensor, ANY, tag, "recvAnySource")

    def _receive(self, tensor: Tensor, source: int, tag: int, form: str) -> ReceiveWork:
        flat = movable("recv", tensor)
        span = spans.begin(self.label, form, [tensor])
        wake = sys._getframe(2).f_code is not _RECV
        operation = self.team.engine.recv(flat, source, tag, site(3), wake)
        finish = filling([tensor], flat)
        return ReceiveWork(self, operation, [tensor], finish, self.timeout_s, span)
