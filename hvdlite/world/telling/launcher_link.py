"""Tells hvdrun what this rank does, if hvdrun has started it: by notes to the rank's keeper.

Telling never blocks, raises or ends the process. A note is lost if this process lacks the way: no
hvdrun, a wrapper that closes its descriptors before it starts Python, a full buffer. A program that
the rank has started inherits the way, but is not the rank, and tells nothing.
"""

from __future__ import annotations

import array
import os
import socket
import sys
from collections.abc import Sequence

from hvdrun.for_hvdlite import notes

# Of the process that first told that it is the rank. Its forks have the way, but are no ranks.
_pid: int | None = None


def keeper() -> tuple[int, int, int]:
    """The socket to this rank's keeper: its descriptor, and the device and inode of the file. The
    descriptor is -1 without hvdrun, or if the program has closed it."""
    fd = notes.descriptor(os.environ.get(notes.VARIABLE, ""))
    if fd is None:
        return -1, 0, 0
    status = os.fstat(fd)
    return fd, status.st_dev, status.st_ino


def tell(kind: bytes, data: bytes = b"", fds: Sequence[int] = (), claims: bool = True) -> bool:
    """Sends a note: one of the kinds of `notes`, with at most `notes.KINDS[kind]` bytes of data,
    and descriptors. claims: this process is the rank, so that its forks are not. False if it was
    not sent."""
    global _pid
    if claims:
        _pid = _pid or os.getpid()
    fd = notes.descriptor(os.environ.get(notes.VARIABLE, ""))
    if fd is None or _pid not in (None, os.getpid()) or _is_anothers_child():
        return False
    try:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=fd)
    except OSError:
        return False
    try:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        end.sendmsg([kind + data], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except OSError:
        return False
    finally:
        end.detach()  # leaves the descriptor open for the next note
    return True


def report_stall(text: str) -> None:
    """Shows a report that is not the engine's as that shows its own: on stderr, and to hvdrun,
    which then says where the ranks are."""
    sys.stderr.write(f"hvdlite: {text}\n")
    sys.stderr.flush()
    tell(notes.STALLED, text.encode(errors="replace")[: notes.KINDS[notes.STALLED]])


def _is_anothers_child() -> bool:
    """Whether a process that this one descends from is the rank (see `mpi.rank_process`)."""
    rank = os.environ.get("HVDLITE_RANK_PROCESS", "").partition(":")[0]
    return rank.isdecimal() and int(rank) != os.getpid()
