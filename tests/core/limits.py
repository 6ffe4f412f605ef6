"""Where the core's ways part: sizes around its limits, and knobs that bring these within reach."""

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
_LIMITS_BYTES = {"default knobs": (4096, 262144), "tiny knobs": (64, 128, 256, 512, 1024, 3072)}


def counts(knobs: str, dtype: str, size: int) -> list[int]:
    """Element counts: the smallest, the number of ranks, a prime, and one around every limit."""
    item_bytes = getattr(torch, dtype).itemsize
    around = {limit // item_bytes + more for limit in _LIMITS_BYTES[knobs] for more in (-1, 0, 1)}
    return sorted({0, 1, size - 1, size, size + 1, 251, *around})
