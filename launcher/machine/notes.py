"""What hvdlite in a rank and hvdrun leave for each other. Imported by every rank and by the agents:
hence little of the standard library.

**Notes.** The keeper makes a pair of sockets that keep the limits of messages. The command inherits
one end, and HVDRUN_NOTES says which descriptor it is and which socket: a program may close the
descriptor and open another file under its number, which must not get a note. A note is one byte,
its kind, and up to KINDS[kind] bytes of data.

**The black box**, memory of a rank: `hvdl_box_memory` of the core's operations/black_box.h.

**Results**: what the ranks of `hvdlite.run` return, in the caller's file in memory, which hvdrun
fills.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator

# -------------------------------------------------------------------- notes

VARIABLE = "HVDRUN_NOTES"
INIT_BEGUN = b"B"  # hvd.init() starts or joins MPI, and waits for all ranks
INIT_DONE = b"D"  # it has made the world; this rank's number there, and how many there are
INIT_FAILED = b"F"  # it has raised an error
SUMMARY = b"S"  # what the rank has measured, as JSON (see `hvdrun.records`)
PREEMPTIBLE = b"H"  # TERM no longer ends this process: its number, in decimal
PREEMPTED = b"P"  # the ranks have agreed that the job is to end
# With a descriptor: the file into which this process writes its stack at a signal (see
# `agent.rank.notes`), and its folders of libraries
STACK = b"K"
# With a descriptor: the memory in which the rank keeps its last operations (`agent.rank.notes`)
BLACK_BOX = b"O"
PULSE = b"V"  # how far the rank is, as JSON (see `hvdrun.pulse`)
STALLED = b"W"  # a report of the stall check: its text
# Each kind, with the greatest length of its data. The keeper drops all other notes.
KINDS = {
    INIT_BEGUN: 0,
    INIT_DONE: 20,
    INIT_FAILED: 0,
    SUMMARY: 10_000,  # records.LONGEST
    PREEMPTIBLE: 9,
    PREEMPTED: 0,
    STACK: 2000,
    BLACK_BOX: 0,
    STALLED: 1024,
    PULSE: 1000,  # pulse.LONGEST
}
LONGEST = 1 + max(KINDS.values())


def address(fd: int) -> str:
    """The variable's value for this socket."""
    status = os.fstat(fd)
    return f"{fd}:{status.st_dev}:{status.st_ino}"


def descriptor(given: str) -> int | None:
    """The descriptor that the variable means; None if this process does not have that socket."""
    number = given.partition(":")[0]
    try:
        return int(number) if number.isdecimal() and address(int(number)) == given else None
    except (OSError, OverflowError):
        return None


def is_valid(note: bytes) -> bool:
    return len(note) - 1 <= KINDS.get(note[:1], -1)


# -------------------------------------------------------------------- the black box

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


# -------------------------------------------------------------------- results

RESULTS_FILE = "HVDRUN_RESULTS"  # the descriptor of that file, for hvdrun
# Set by keepers: a rank's pipe for what it returns. Where it is set for hvdrun, the ranks get one.
RESULT_PIPE = "HVDLITE_RESULT_PIPE"
_RESULT = struct.Struct("!iI")  # rank, length of the part


def pack_result(rank: int, part: bytes) -> bytes:
    return _RESULT.pack(rank, len(part)) + part


def unpack_results(buffer: bytearray) -> Iterator[tuple[int, bytes]]:
    """Removes the complete parts from the front of the buffer, and yields them with their ranks."""
    while len(buffer) >= _RESULT.size:
        rank, length = _RESULT.unpack_from(buffer)
        end = _RESULT.size + length
        if len(buffer) < end:
            return
        part = bytes(buffer[_RESULT.size : end])
        del buffer[:end]
        yield rank, part
