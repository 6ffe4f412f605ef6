"""What a lane needs of the devices that tensors lie on: queues of work, and marks in them.

The words are CUDA's in general terms: a track is a stream of the lane's own, a mark is an event.
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
    """A queue of work of one device, which nobody but the lane uses."""

    def behind(self, mark: Any) -> AbstractContextManager[None]:
        """What is started inside is queued here, and runs when the work before `mark` is done."""

    def keep(self, tensor: torch.Tensor) -> None:
        """The memory of `tensor` is not given to others before the work queued here is done, also
        where nobody holds it any more."""

    def mark(self) -> Mark:
        """The end of the queue, as it is now."""


class Devices(Protocol):
    """All devices of this process."""

    def enter(self, device: torch.device) -> None:
        """The calling thread will work with this device, and with no other one unasked."""

    def ready(self, tensor: torch.Tensor) -> Mark:
        """What the calling thread has queued so far for the device of `tensor`."""

    def hand_over(self, done: Any, tensor: torch.Tensor) -> None:
        """What the calling thread queues from now on runs behind `done`. The host does not wait."""

    def track(self, device: torch.device) -> Track:
        """A new queue of this device."""

    def host_buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """Host memory for the values of `tensor`, which copies to and from it need not wait for."""

    def identity(self, device: torch.device) -> str:
        """Which piece of hardware it is, whatever its number in this process; empty: unknown."""

    def problem(self) -> str:
        """Why there can be no group; empty: there can."""

    def group(self, store: Store, rank: int, size: int, device: torch.device) -> Backend:
        """The process group of the ranks that share `store`, for tensors on this device."""
