"""The memory of a rank's black box: `hvdl_box_memory` of the core's operations/black_box.h.

Keepers import it.
"""

from __future__ import annotations

from collections.abc import Callable

Crc32 = Callable[[bytes], int]

# What the text at the begin calls this layout.
FORMAT = 3
# A text that ends with a NUL, and then the entries, each of which begins with its ticket.
HEAD_BYTES, ENTRY_BYTES, ENTRIES = 4096, 192, 512
TOTAL_BYTES = HEAD_BYTES + ENTRIES * ENTRY_BYTES
# In the first part, at its end: where the script has waited for hvdlite last (`lines_in`).
LINES_AT, LINES_BYTES = 3072, 1016
_SUM_BYTES, _TIME_BYTES = 4, 8
# In an entry, after its ticket and key: when the operation was posted.
_POSTED_AT, _POSTED_BYTES = 16, 8
# What a keeper sends of it, compressed: never much longer than what it was made from.
LARGEST_BYTES = TOTAL_BYTES + 1024


def pack_lines(lines: list[str], at_ns: int, crc32: Crc32) -> bytes:
    """The bytes to be written at LINES_AT: whole lines, as many as fit. at_ns: now, by the
    monotonic clock. crc32: zlib's. A rank that is killed while it writes leaves bytes of another
    sum."""
    text = at_ns.to_bytes(_TIME_BYTES, "little")
    for line in lines:
        more = line.replace("\0", "?").encode(errors="replace") + b"\n"
        if _SUM_BYTES + len(text) + len(more) > LINES_BYTES:
            break
        text += more
    padded = text.ljust(LINES_BYTES - _SUM_BYTES, b"\0")
    return crc32(padded).to_bytes(_SUM_BYTES, "little") + padded


def lines_in(memory: bytes, crc32: Crc32) -> bytes:
    """The text of these lines; empty if there are none, if they were being written, or if they
    are no longer true: not every wait is noted. memory: all of it."""
    found = memory[LINES_AT : LINES_AT + LINES_BYTES]
    summed, padded = found[:_SUM_BYTES], found[_SUM_BYTES:]
    if len(found) < LINES_BYTES or crc32(padded).to_bytes(_SUM_BYTES, "little") != summed:
        return b""
    at_ns = int.from_bytes(padded[:_TIME_BYTES], "little")
    begins = range(HEAD_BYTES + _POSTED_AT, len(memory) - ENTRY_BYTES + _POSTED_AT + 1, ENTRY_BYTES)
    posted = (int.from_bytes(memory[at : at + _POSTED_BYTES], "little") for at in begins)
    # A wait that is noted first and posted then is the same one.
    if sum(posted_ns > at_ns for posted_ns in posted) > 1:
        return b""
    return padded[_TIME_BYTES:].partition(b"\0")[0]
