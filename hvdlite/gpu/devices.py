"""The devices as a queue uses them: queues of work, and marks in them.

The words are CUDA's in general terms: a track is a stream of the queue's own, a mark is an event.
`hvdlite.gpu.cuda` is the real thing; the tests have one for tensors in host memory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from hvdlite.gpu.backend import Backend


class Mark(Protocol):
    """A place in a queue of work."""

    def query(self) -> bool:
        """Whether the work before it is done. Never blocks."""


class Track(Protocol):
    """A queue of work of one device; only the queue uses it."""

    def behind(self, mark: Any) -> AbstractContextManager[None]:
        """Work started inside is queued here, and runs when the work before `mark` is done."""

    def keep(self, tensor: torch.Tensor) -> None:
        """The memory of `tensor` is not reused before the work queued here is done, even if nobody
        holds the tensor any more."""

    def mark(self) -> Mark:
        """The end of the queue, as it is now."""


class Devices(Protocol):
    """All devices of this process."""

    def enter(self, device: torch.device) -> None:
        """Makes this the calling thread's current device."""

    def ready(self, tensor: torch.Tensor) -> Mark:
        """Marks the end of the calling thread's queued work on the device of `tensor`."""

    def hand_over(self, done: Any, tensor: torch.Tensor) -> None:
        """Work that the calling thread queues from now on runs after `done`. Does not block."""

    def stream(self, device: torch.device) -> int:
        """A name of the queue in which the calling thread's work on this device goes."""

    def wait_for_stream(self, device: torch.device, stream: int) -> None:
        """Work that the calling thread queues from now on runs after what is in that queue."""

    def keep(self, tensor: torch.Tensor) -> None:
        """The memory of `tensor` is not reused before the work that the calling thread has queued
        is done."""

    def is_capturing(self) -> bool:
        """Whether the calling thread's work becomes a part of a CUDA graph."""

    @property
    def averages(self) -> bool:
        """Whether groups can divide a sum by their size as they add up."""

    def track(self, device: torch.device) -> Track:
        """A new queue of this device."""

    def wait(self, mark: Mark) -> None:
        """Blocks until the work before `mark` is done. Other threads of Python run meanwhile."""

    def copy(self, to: torch.Tensor, values: torch.Tensor) -> None:
        """Queues a copy between a device's memory and a host buffer: inside `Track.behind` on that
        track, else as the calling thread's own work. Does not block."""

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Host memory (uint8), which copies need not wait for."""

    def identity(self, device: torch.device) -> str:
        """The hardware's identity, whatever its number in this process; empty: unknown."""

    def problem(self) -> str:
        """Why no group can be formed; empty: it can."""

    def may_be_shared(self) -> bool:
        """Whether several ranks of a group may use one device."""

    def group(self, store: Store, rank: int, size: int, device: torch.device) -> Backend:
        """The process group of the ranks that share `store`, for tensors on this device."""
