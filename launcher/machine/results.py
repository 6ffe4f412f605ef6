"""What the ranks of `hvdlite.run` return, in the caller's file in memory, which hvdrun fills."""

from __future__ import annotations

import struct
from collections.abc import Iterator

FILE = "HVDRUN_RESULTS"  # the descriptor of that file, for hvdrun
# Set by keepers: a rank's pipe for what it returns. Where it is set for hvdrun, the ranks get one.
PIPE = "HVDLITE_RESULT_PIPE"
_HEAD = struct.Struct("!iI")  # rank, length of the part


def pack(rank: int, part: bytes) -> bytes:
    return _HEAD.pack(rank, len(part)) + part


def unpack(buffer: bytearray) -> Iterator[tuple[int, bytes]]:
    """Removes the complete parts from the front of the buffer, and yields them with their ranks."""
    while len(buffer) >= _HEAD.size:
        rank, length = _HEAD.unpack_from(buffer)
        end = _HEAD.size + length
        if len(buffer) < end:
            return
        part = bytes(buffer[_HEAD.size : end])
        del buffer[:end]
        yield rank, part
