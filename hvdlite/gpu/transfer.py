"""One collective of a tensor on a GPU, from the posting to the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from hvdlite import _core
from hvdlite.gpu.devices import Mark

if TYPE_CHECKING:
    from hvdlite.gpu.process_group import Group
    from hvdlite.gpu.queue import GpuQueue
    from hvdlite.gpu.staging import Staging


class Transfer:
    """A collective in its queue; waited for like an operation of the engine.

    Its fields are the queue's to change. It holds the user's tensor until the work with it is
    queued; from then on the allocator of the tensor's memory knows of that work.
    """

    __slots__ = (
        "awaited",
        "counts",
        "done",
        "failure",
        "gpu_queue",
        "over",
        "ready",
        "request",
        "result",
        "served",
        "staging",
        "tensor",
        "then",
    )

    def __init__(
        self,
        queue: GpuQueue,
        request: _core.Posting,
        tensor: torch.Tensor | None,
        result: torch.Tensor | None,
        ready: Mark | None = None,
    ) -> None:
        """request: what was posted, without the tensors."""
        self.gpu_queue = queue
        self.request = request
        # Contiguous. None when the work is queued.
        self.tensor = tensor
        # Of the tensor's device; may be the tensor. None where its size is not known yet.
        self.result = result
        # When the input is there.
        self.ready = ready
        # The engine's operation that must end before the transfer can take its turn.
        self.awaited: _core.Operation | None = None
        # Its way through host memory, once that has begun.
        self.staging: Staging | None = None
        # Rows from each member, of what gathers.
        self.counts: tuple[int, ...] | None = None
        # When the result is there.
        self.done: Mark | None = None
        self.failure: str | None = None
        # It goes on without a caller that waits.
        self.served = False
        # The host has nothing left to do.
        self.over = False
        # Called by the queue when it is launched.
        self.then: Callable[[Group], None] | None = None

    @property
    def key(self) -> tuple[int, str]:
        """Unique among the transfers in flight."""
        return (-1 if self.request.unnamed else self.request.kind, self.request.name)

    @property
    def gathers(self) -> bool:
        """Whether its result has rows of all members, and so is made when their number is known."""
        return _core.KINDS[self.request.kind].gathers

    def poll(self) -> bool:
        """Whether the result is there, or it has failed. Never blocks, but where MPI can't be
        called by another thread: then the queue goes on here."""
        self.gpu_queue.look()
        return self.over and (self.done is None or self.done.query())

    def wait(self) -> str | None:
        """Returns when all work is queued: None, or the text of the failure.

        What the calling thread then queues for the device finds the result there.
        """
        if not self.over:
            self.gpu_queue.wait_for(self)
        if self.failure is None:
            assert self.done is not None
            assert self.result is not None
            self.gpu_queue.devices.hand_over(self.done, self.result)
        return self.failure

    def end(self, failure: str | None) -> None:
        """Called by the queue: the host has nothing left to do."""
        self.failure = failure
        self.tensor = self.ready = self.staging = None
        if failure is not None:
            self.result = None
        self.over = True

    def label(self) -> tuple[str, str]:
        """The kind's name, and the operation's."""
        return _core.KINDS[self.request.kind].name, self.request.name

    def rows(self) -> tuple[int, ...]:
        """Allgather and alltoall, after success: the rows that came from each member."""
        assert self.counts is not None
        return self.counts

    def value(self) -> torch.Tensor:
        """The result, after `wait` has said that there is one."""
        assert self.result is not None
        return self.result
