"""A bucket in which each rank adds up the gradients of several micro-batches first, along the tree
of all virtual ranks (HVDLITE_DETERMINISTIC=virtual:V).

A gradient's micro-batches are added up as a binary counter counts. After micro-batch k, from 0, a
stack has one sum per 1 in the binary digits of k + 1, each of as many micro-batches as that digit
stands for: the gradient of micro-batch k is added to the uppermost sums, as many as k has trailing
ones.

    k = 0: g0      k = 1: (g0 + g1)      k = 2: (g0 + g1), g2      k = 3: (g0 + g1) + (g2 + g3)

Float16 and bfloat16 are added up in float32, and travel as float32: so they are rounded once, where
all ranks have been added, as those of one micro-batch per rank are. All of it is done by the
kernels that add up along the tree over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hvdlite import _core
from hvdlite.compression import Compressor
from hvdlite.ops import DTYPES
from hvdlite.optimizer.buckets.bucket import Bucket
from hvdlite.optimizer.buckets.layout import BucketLayout
from hvdlite.optimizer.buckets.pages import Pages
from hvdlite.optimizer.buckets.slot import Slot, place_in

# A sum of micro-batches, or the gradient of one; None: they had none, which counts as zeros.
Part = torch.Tensor | None


class Widened(Compressor):
    """16-bit floats travel as float32."""

    @classmethod
    def travels_as(cls, dtype: torch.dtype) -> torch.dtype:
        is_narrow = dtype in (torch.float16, torch.bfloat16)
        return torch.float32 if is_narrow else dtype


def require_addable(params: Iterable[tuple[str, torch.Tensor]]) -> None:
    """params: with their names. Raises ValueError if gradients of one can't be added up along the
    tree."""
    for name, param in params:
        if not param.is_cpu or param.dtype is torch.complex32:
            what = "complex32" if param.is_cpu else f"on {param.device}"
            raise ValueError(
                f"{name!r} is {what}: HVDLITE_DETERMINISTIC=virtual:V adds up gradients in host "
                "memory, and none of complex32; use a CPU and complex64, or no virtual ranks"
            )


class TreeBucket(Bucket):
    """Adds up `micro_batches` gradients of each of its slots, a power of two, at least 2."""

    def __init__(
        self,
        micro_batches: int,
        averages: bool,
        layout: BucketLayout,
        slots: Sequence[Slot],
        compression: type[Compressor],
        pages: Pages | None = None,
    ) -> None:
        """averages: whether the plan divides by the number of all micro-batches."""
        super().__init__(layout, slots, compression, pages)
        self.takes_copies = False
        self._offsets = layout.offsets_elems
        # By position, the stack of a slot.
        self._parts: list[list[Part]] = [[] for _ in self.slots]
        # The memory of sums of 2, 4, 8 … micro-batches, but not of all.
        levels = micro_batches.bit_length() - 2
        dtype = self.flat.dtype if self._same_memory() else self.wire.dtype
        self._sums = [self.zeros(len(self.gradients), dtype, "cpu") for _ in range(levels)]
        self.one = float(micro_batches) if averages else 1.0

    def add(self, slot: Slot, micro_batch: int, grad: Part) -> None:
        """Adds the gradient of a micro-batch that is not the last one. It must not change after
        this."""
        parts = self._parts[slot.position]
        merged = (~micro_batch & (micro_batch + 1)).bit_length() - 1
        if not merged:
            parts.append(None if grad is None else self._fitting(slot, grad))
            return
        terms = [*parts[-merged:], grad]
        total: Part = None
        if any(term is not None for term in terms):
            total = place_in(self._sums[merged - 1], self._offsets[slot.position], slot.param)
            self._add_up(slot, terms, total)
        parts[-merged:] = [total]

    def has_parts(self, slot: Slot) -> bool:
        """Whether some micro-batch has had its gradient."""
        return any(part is not None for part in self._parts[slot.position])

    def forget(self) -> None:
        """A step has ended, or is given up."""
        for parts in self._parts:
            parts.clear()

    def put(self, slot: Slot, grad: Part) -> None:
        """Adds that of the last micro-batch; the sum of all gets to its place. May be called
        again."""
        parts = self._parts[slot.position]
        assert len(parts) == len(self._sums) + 1
        self._add_up(slot, [*parts, grad], self.contribution(slot))

    def contribution(self, slot: Slot) -> torch.Tensor:
        assert slot.view is not None
        if self._same_memory():
            return slot.view
        return place_in(self.wire, self._offsets[slot.position], slot.param)

    def contributions(self) -> torch.Tensor:
        return self.gradients if self._same_memory() else self.wire[: len(self.gradients)]

    def _load(self) -> None:
        # The sums are in what is reduced already.
        if not self._same_memory():
            first = len(self.gradients)
            self.wire[first : first + len(self.mask)].copy_(self.mask)

    def _unload(self) -> None:
        if not self._same_memory():
            _reduce([self.wire], self.flat)

    def _add_up(self, slot: Slot, terms: Sequence[Part], total: torch.Tensor) -> None:
        """total = terms[0] + (terms[1] + (… + terms[-1])); the last two are single gradients."""
        *sums, left, right = terms
        leaves = [self._fitting(slot, grad) for grad in (left, right)]
        uppers = [self._zeros_like(total) if part is None else part for part in sums]
        if leaves[0].dtype is total.dtype:
            _reduce([*uppers, *leaves], total)
            return
        _reduce(leaves, total)
        if uppers:
            _reduce([*uppers, total], total)

    def _fitting(self, slot: Slot, grad: Part) -> torch.Tensor:
        """The gradient, with the strides of its place."""
        place = slot.view
        assert place is not None
        if grad is None:
            return self._zeros_like(place)
        is_alike = grad.dtype is place.dtype and grad.stride() == place.stride()
        if is_alike and not grad.is_conj() and not grad.is_neg():
            return grad
        return torch.empty_like(place).copy_(grad)

    @staticmethod
    def _zeros_like(like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(like.numel(), dtype=like.dtype, device="cpu")


def _reduce(inputs: Sequence[torch.Tensor], output: torch.Tensor) -> None:
    """Adds up tensors that lie alike in memory, from the last one on."""
    of, to = (each.real.dtype if each.is_complex() else each.dtype for each in (inputs[0], output))
    last = len(inputs) - 1
    _core.reduce_tree(
        *(_core.kernel_variants()[0], DTYPES[of], DTYPES[to], _core.SUM, output.data_ptr()),
        *(tuple(tensor.data_ptr() for tensor in inputs), bytes(last) + bytes([last])),
        *(output.numel() * (1 + output.is_complex()), 1.0, 1, 1.0),
    )
