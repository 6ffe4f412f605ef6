"""The flat buffers through which the small tensors of a group travel."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import AbstractContextManager

import torch
from torch._utils import _unflatten_dense_tensors

# Idle buffers are kept for reuse: up to this size each, and at most this many.
IDLE_BYTES = 1 << 20
MOST_IDLE = 16

Key = tuple[torch.dtype, torch.device, int]


class FlatBuffer:
    """A flat buffer, and views of it with the shapes of some tensors.

    In host memory it is kept for the next group of the same layout, since making the views takes as
    long as copying. (On a GPU the work may still be queued when the host is done with the buffer,
    so the allocator decides when its memory is reused.)
    """

    __slots__ = ("_key", "_shapes", "_views", "flat")

    def __init__(self, key: Key, shapes: list[torch.Size], tensors: list[torch.Tensor]) -> None:
        self._key = key
        self._shapes = shapes
        with _unrecorded(key[1]):
            count = sum([tensor.numel() for tensor in tensors])
            self.flat = torch.empty(count, dtype=key[0], device=key[1])
            self._views = _unflatten_dense_tensors(self.flat, tensors)  # type: ignore[no-untyped-call]

    @classmethod
    def of(cls, tensors: list[torch.Tensor], shapes: list[torch.Size], digest: int) -> FlatBuffer:
        """A buffer for these tensors: one dtype, one device, none empty.

        shapes: theirs. digest: a hash of them.
        """
        key = tensors[0].dtype, tensors[0].device, digest
        buffer = _idle.pop(key, None)
        if buffer is None or buffer._shapes != shapes:
            return cls(key, shapes, tensors)
        return buffer

    def take(self, tensors: list[torch.Tensor]) -> None:
        """Copies the tensors into the buffer."""
        with _unrecorded(self._key[1]):
            torch._foreach_copy_(self._views, tensors)

    def give(self, tensors: list[torch.Tensor]) -> None:
        """Copies the buffer into the tensors."""
        with _unrecorded(self._key[1]):
            torch._foreach_copy_(tensors, self._views)

    def keep(self) -> None:
        """Keeps it for the next group. The caller never uses it again, even if interrupted here."""
        if self.flat.is_cpu and self.flat.nbytes <= IDLE_BYTES:
            _idle[self._key] = self
            if len(_idle) > MOST_IDLE:
                _idle.popitem(last=False)


def _unrecorded(device: torch.device) -> AbstractContextManager[None]:
    """Hides copies to and from a buffer from autograd.

    Uses inference mode, which halves the cost of views; but not on a GPU, where its thread,
    which is not in that mode, changes the buffer.
    """
    return torch.inference_mode() if device.type == "cpu" else torch.no_grad()


# Idle buffers, the longest unused first.
_idle: OrderedDict[Key, FlatBuffer] = OrderedDict()
