"""The ranks' weights, as they travel in a bucket: each exactly, whatever the bucket's dtype.

A sum of the weights would be rounded to the bucket's dtype, to 8 bits in bfloat16. So each member
has places of its own, in which the others have zeros, and puts there the 64 bits of its weight as
whole numbers of a few bits. Such a number survives adding zeros, the scale factors (whose product
is 1 / size) and the rounding in between: every member gets every weight as it is.
"""

from __future__ import annotations

import functools
import math

import torch

_BITS = 64


def _digit_bits(dtype: torch.dtype) -> int:
    """How many bits one element carries: what is left of a significand after several roundings."""
    return 5 if dtype.itemsize == 2 else 16


def elems(dtype: torch.dtype, members: int) -> int:
    """How many elements the weights of so many members take."""
    return members * -(-_BITS // _digit_bits(dtype))


def put(place: torch.Tensor, member: int, members: int, weight: float | None) -> None:
    """Fills the place of all weights, with this member's own.

    place: `elems` elements. weight: 0 or positive and finite; None: there is none.
    """
    place.zero_()
    if weight is None:
        return
    bits = int(torch.tensor(weight, dtype=torch.float64, device="cpu").view(torch.int64).item())
    width = _digit_bits(place.dtype)
    digits = [bits >> shift & (1 << width) - 1 for shift in range(0, _BITS, width)]
    own = torch.tensor(digits, dtype=place.dtype, device="cpu")
    place[member * len(digits) :][: len(digits)].copy_(own)


def total(place: torch.Tensor, members: int) -> float:
    """The sum of all weights, the same on every member: the exact sum, rounded once.

    place: as the reduction has left it, by which it was divided by the number of members.
    """
    digits = (place.double() * members).round().to("cpu", torch.int64).view(members, -1)
    bits = (digits << _shifts(_digit_bits(place.dtype))).sum(1)
    return math.fsum(bits.view(torch.float64).tolist())


def quotient(members: int, weights: float) -> float:
    """What makes a weighted mean of a weighted sum that was divided by the number of members. If
    all weights are 0, so is the sum, and stays it."""
    return members / weights if weights else 1.0


@functools.cache
def _shifts(width: int) -> torch.Tensor:
    return torch.arange(0, _BITS, width, device="cpu")
