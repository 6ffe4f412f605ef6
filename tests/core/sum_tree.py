"""What the deterministic mode computes, in torch: sums along a tree (base/sum_tree.h)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.core import scaling


def draw(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Sums of these depend on their order. Some are zeros of both signs."""
    generator = torch.Generator().manual_seed(1000 * rank + count)
    values = torch.randn(count, generator=generator, dtype=torch.float64)
    values = (values * 10.0 ** (values * 2).round().clamp(-3, 3)).to(dtype)
    values[::13] = 0.0 if rank % 2 else -0.0
    values[::26] = -0.0
    return values


def combined(op: str, parts: Sequence[Tensor | None]) -> Tensor | None:
    """None: of ranks that have joined."""
    if len(parts) == 1:
        return parts[0]
    middle = 1 << (len(parts) - 1).bit_length() - 1
    left, right = combined(op, parts[:middle]), combined(op, parts[middle:])
    if left is None or right is None:
        return right if left is None else left
    if op in ("Min", "Max"):
        first = (left < right) if op == "Min" else (left > right)
        return torch.where(first | (left != left), left, right)
    return left * right if op == "Product" else left + right


def reduced(
    given: Sequence[Tensor | None], op: str, prescale: float = 1.0, postscale: float = 1.0
) -> Tensor:
    """given: by rank. 16-bit floats are computed in float32, and rounded once."""
    dtype = next(x.dtype for x in given if x is not None)
    parts = [None if x is None else scaling.times(prescale, scaling.widened(x)) for x in given]
    total = combined(op, parts)
    assert total is not None
    return scaling.finished(total, dtype, op, postscale, len(given))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
