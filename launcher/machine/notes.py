"""Notes: what hvdlite in a rank tells the rank's keeper, and how it finds the way there.

The keeper makes a pair of sockets that keep the limits of messages. The command inherits one end,
and HVDRUN_NOTES says which descriptor it is and which socket: a program may close the descriptor
and open another file under its number, which must not get a note.

A note is one byte, its kind, and up to KINDS[kind] bytes of data. Imported by every rank and by the
agents: hence little of the standard library.
"""

from __future__ import annotations

import os

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
