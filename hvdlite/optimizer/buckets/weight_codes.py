"""The ranks' weights, as they travel in a bucket: each exactly, whatever the bucket's dtype.

A sum of the weights would be rounded to the bucket's dtype, to 8 bits in bfloat16. So each member
has places of its own, in which the others have zeros, and puts there the 64 bits of its weight as
whole numbers of a few bits. Such a number survives adding zeros, the scale factors (whose product
is 1 / size) and the rounding in between: every member gets every weight as it is.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence

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
    place.copy_(_row(place.dtype, member, members, weight or 0.0))


# Most steps have the weight of the one before.
@functools.lru_cache(maxsize=8)
def _row(dtype: torch.dtype, member: int, members: int, weight: float) -> torch.Tensor:
    width = _digit_bits(dtype)
    (bits,) = struct.unpack("<q", struct.pack("<d", weight))
    digits = [bits >> shift & (1 << width) - 1 for shift in range(0, _BITS, width)]
    row = [0] * (member * len(digits)) + digits + [0] * ((members - member - 1) * len(digits))
    return torch.tensor(row, dtype=dtype, device="cpu")


def weights(place: torch.Tensor, members: int) -> list[float]:
    """The weights of all members, by member.

    place: as the reduction has left it, by which it was divided by the number of members.
    """
    width = _digit_bits(place.dtype)
    each = len(place) // members
    numbers = [round(number * members) for number in place.tolist()]
    return [_weight(numbers[first : first + each], width) for first in range(0, len(numbers), each)]


def total(place: torch.Tensor, members: int) -> float:
    """The sum of all weights, the same on every member: the exact sum, rounded once."""
    return math.fsum(weights(place, members))


def _weight(digits: Sequence[int], width: int) -> float:
    bits = sum(digit << width * index for index, digit in enumerate(digits))
    (weight,) = struct.unpack("<d", struct.pack("<q", bits))
    return float(weight)


def quotient(members: int, weights: float) -> float:
    """What makes a weighted mean of a weighted sum that was divided by the number of members. If
    all weights are 0, so is the sum, and stays it."""
    return members / weights if weights else 1.0
