"""Sizes around the limits where the core takes another path, and knobs that lower these limits."""

from __future__ import annotations

import torch

LAYOUTS = ("1,1", "1,1,1", "2,2", "3,1", "1,3,3", "2,1,1")
SIZES = (1, 2, 3, 4, 7)

DEFAULT: dict[str, str] = {}
# So small that a few hundred elements are several pieces of several blocks and segments.
TINY = {
    "HVDLITE_INLINE_BYTES": "64",
    "HVDLITE_SEGMENT_BYTES": "128",
    "HVDLITE_BLOCK_BYTES": "256",
    "HVDLITE_PIECE_BYTES": "1024",
}
KNOBS = {"default knobs": DEFAULT, "tiny knobs": TINY}
_LIMITS_BYTES = {"default knobs": (4096,), "tiny knobs": (64, 128, 256, 512, 1024, 3072)}
_BLOCK_BYTES = 262144


def counts(knobs: str, dtype: str, size: int, large: bool = True) -> list[int]:
    """Element counts: the smallest, the number of ranks, a prime, and those around every limit.

    large: also some thousands of elements more than a block holds.
    """
    item_bytes = getattr(torch, dtype).itemsize
    around = {limit // item_bytes + more for limit in _LIMITS_BYTES[knobs] for more in (-1, 0, 1)}
    if large and knobs == "default knobs":
        around |= {_BLOCK_BYTES // item_bytes, _BLOCK_BYTES // item_bytes + 4099}
    return sorted({0, 1, size - 1, size, size + 1, 251, *around})
