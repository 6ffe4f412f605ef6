"""The gradient arena: the flat memory of a bucket, and the places of its gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdlite import _core
from hvdlite.buckets import Slots
from hvdlite.compression import Compressor


class Slot:
    """The place of one parameter's gradient."""

    __slots__ = ("bucket", "dirty", "mark", "name", "param", "view")

    def __init__(self, name: str, param: torch.Tensor) -> None:
        self.name = name
        self.param = param
        self.bucket: Bucket
        self.view: torch.Tensor
        # The last round to which this rank, or another, had a gradient.
        self.mark = -1
        # The round for which a backward that did not communicate left a gradient.
        self.dirty = -1


class Bucket:
    """Gradients that are reduced together.

    flat: their memory. wire: what the engine reduces, which is the same memory unless gradients are
    compressed or live on another device; then it is copied there and back.
    """

    __slots__ = ("absent", "flat", "operation", "pending", "plan", "presence", "slots", "wire")

    def __init__(self, layout: Slots, slots: Sequence[Slot], compression: type[Compressor]) -> None:
        self.slots = [slots[i] for i in layout.members]
        like = self.slots[0].param
        # Zeros also between the gradients: what lies there is added too.
        self.flat = torch.zeros(layout.elems, dtype=like.dtype, device=like.device)
        for slot, offset in zip(self.slots, layout.offsets_elems, strict=True):
            slot.bucket = self
            slot.view = _view(self.flat, offset, slot.param)
        self.presence = self.flat[layout.presence_offset_elems :]
        real = real_view(self.flat)
        dtype = compression.travels_as(real.dtype)
        if dtype is real.dtype and like.is_cpu:
            self.wire = real
        else:
            pin = like.is_cuda
            self.wire = torch.zeros(real.numel(), dtype=dtype, device="cpu", pin_memory=pin)
        self.plan: _core.Plan
        self.operation: _core.Operation | None = None
        self.pending = len(self.slots)
        # Where this rank has no gradient in the present round.
        self.absent: list[int] = []

    def same_memory(self) -> bool:
        return self.wire.data_ptr() == self.flat.data_ptr() and self.flat.is_cpu


def real_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, flat, as real numbers: what is complex is reduced in its two parts."""
    return torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor


def _view(flat: torch.Tensor, offset: int, param: torch.Tensor) -> torch.Tensor:
    """A gradient's place, with the parameter's strides if these leave no gaps.

    `.data`: views of one tensor would share its version counter, and one in-place change would
    count for all of them.
    """
    part = flat[offset : offset + param.numel()].data
    last = sum(
        (size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True)
    )
    if param.numel() and not param.is_contiguous() and last + 1 == param.numel():
        return part.as_strided(param.shape, param.stride())
    return part.view(param.shape)
