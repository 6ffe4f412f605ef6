"""Frames between hvdrun, its agents on other hosts and the keepers of the ranks.

A frame is a header (kind, rank, length) and a payload. Sockets within a host also carry file
descriptors. Imported by the agents, hence the standard library only.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
from collections.abc import Iterable

from hvdrun.machine.notes import is_valid

# The host agent's first bytes; all before them is from the remote shell's start-up files.
HELLO = b"\nhvdrun-host-agent\0"

# A frame's header: kind, rank (-1: none), length of the payload.
HEADER = struct.Struct("!ciI")
INT = struct.Struct("i")  # a file descriptor, as sockets carry it
# keeper → supervisor: a rank is about to start; the session folder of MPI's daemon, and the
# descriptors of the rank's stdout and stderr
RANK = b"R"
GO = b"G"  # supervisor → keeper: start; with stdin for rank 0
# hvdrun → host agent, before START; supervisor → keeper, before GO: the ranks' variables.
VARIABLES = b"v"
# keeper → supervisor: how the command ended ('code 3', 'signal 9', 'oom 9' if the kernel killed it
# for lack of memory, 'shm 7 64/64' if SIGBUS or SIGSEGV ended it beside a full /dev/shm, with the
# bytes used and in all, 'missing 2' if there is no such program, 'lacks 11' if the agent could not
# start it; after 'asked ' if the keeper ended it, after 'late ' if MPI had ended the shim before),
# and when, in nanoseconds of the host's monotonic clock
EXIT = b"X"
# keeper → supervisor: the rank called MPI_Init, or MPI_Finalize; only if the keeper can see it
MPI_BEGUN, MPI_DONE = b"M", b"m"
# keeper → supervisor: the job's name in MPI, once the daemon has told the rank (MPICH and its like)
MPI_JOB = b"J"
NOTE = b"Q"  # keeper → supervisor: what hvdlite in the rank told it (see machine/notes)
# keeper → supervisor: the rank runs on and has closed its end of PMI or of the way for notes, so it
# has closed what it does not know, perhaps MPI's, too. With the time, as for EXIT
CLOSED = b"C"
# hvdrun → keeper: what does the rank do now? The payload is WITH_STACK if its Python stack is
# wanted, too, or WITH_STACK_AND_BOX. Where a host agent passes it on, the rank and a space are in
# front. Back: the answer (see machine/looks); empty if looking has failed
LOOK, LOOKED = b"L", b"l"
WITH_STACK = b"stack"
WITH_STACK_AND_BOX = b"stack and black box"
# keeper → supervisor, before EXIT: the rank's last operations (see rank.notes)
BLACK_BOX = b"A"
BLACK_BOX_NOW = b"a"  # the same of a rank that runs, before LOOKED, if asked for
KEEPER_GONE = b"K"  # the connection to a keeper ended
OUT, ERR = b"O", b"E"  # what a rank wrote
RESULT = b"="  # a part of what a rank of `hvdlite.run` returns
# host agent → hvdrun: its answer to the question that it was started with, as JSON
FACTS = b"f"
# hvdrun → host agent, before the job starts: an order of preflight's (see connecting), as JSON.
# Back: the answer
ORDER = b"o"
# the ssh role → hvdrun: the job's key, which host MPI wants to reach, whether with options of MPI's
# for ssh, the shell for which the daemon's command is written, that command, and the words of a
# command that connects to a host agent there, with b"\0" between them
HOST = b"H"
# hvdrun → host agent: the job starts; its name (see peers), after how many seconds of silence each
# side counts as lost, and the same shell and command, with b"\0" between them
START = b"S"
# host agent → hvdrun: it ends its ranks, as hvdrun has been silent for too long; for how many
# seconds, and when, in nanoseconds of the host's monotonic clock
GAVE_UP = b"Y"
REFUSED = b"N"  # host agent → hvdrun: why it can't supervise ranks; then it ends
# host agent → hvdrun: another one of the job supervises the ranks there: two names are one machine
SHARES = b"F"
DAEMON = b"D"  # host agent → hvdrun: what MPI's daemon wrote
# host agent → hvdrun: all has ended there; with the exit code of MPI's daemon. hvdrun → a role in
# ssh's place: the same; and why, if that is a failure of hvdrun's own
BYE = b"B"
STDIN = b"I"  # hvdrun → host agent: input for rank 0 (empty: its end); back: ready for more
PING = b"P"  # both ways between hvdrun and host agents; from these, with their monotonic clock
END = b"T"  # end the rank; with the first signal and the grace (see signals)
RELEASE = b"Z"  # supervisor → keeper: all ranks have ended, so MPI may notice
# supervisor → keeper: pass a signal on to the rank; its number, and that of the request. The answer
# is the same, and how that went (see signals.pass_on).
SIGNAL, SIGNALLED = b"U", b"u"

SSH_FAILED = 255  # the exit code of ssh, and of what stands in its place, for failures of its own
PING_EVERY_S = 1.0
GRACE_S = 3.0  # between TERM and KILL, after a failure
SILENT_GRACE_S = 2.0  # the same after silence, when the job has waited long enough
CHUNK = 1 << 16
LONGEST = 8 << 20  # of a payload; the kernel gives a program no more than 6 MiB of variables
# The words that begin an EXIT's payload, after 'asked ' or 'late '
_ENDINGS = (b"code", b"signal", b"oom", b"shm", b"missing", b"lacks")
# What keepers send whose payload may be anything
_OF_KEEPERS = (RANK, MPI_BEGUN, MPI_DONE, MPI_JOB, LOOKED, BLACK_BOX, BLACK_BOX_NOW)


class BadFrame(Exception):
    """What has arrived is no message of hvdrun's, so its sender is broken. Says what it is."""


def frame(kind: bytes, rank: int = -1, payload: bytes = b"") -> bytes:
    return HEADER.pack(kind, rank, len(payload)) + payload


def unpack(buffer: bytearray) -> Iterable[tuple[bytes, int, bytes]]:
    """Removes the complete frames from the front of the buffer, and yields them. Raises BadFrame
    before it waits for more than LONGEST."""
    while len(buffer) >= HEADER.size:
        kind, rank, length = HEADER.unpack_from(buffer)
        if length > LONGEST:
            raise BadFrame(f"a message of {length} bytes")
        end = HEADER.size + length
        if len(buffer) < end:
            return
        payload = bytes(buffer[HEADER.size : end])
        del buffer[:end]
        yield kind, rank, payload


def number(word: bytes) -> int:
    if not (word.isdigit() and len(word) < 20):
        raise BadFrame(f"{word[:20]!r} in place of a number")
    return int(word)


def has_key(key: bytes, secret: str) -> bool:
    """Whether somebody who wants something run knows the job's key. Processes of the same user in
    containers or sandboxes reach the socket, too, and do not know it."""
    from hmac import compare_digest  # few need it

    return compare_digest(key, secret.encode())


def check(kind: bytes, rank: int, payload: bytes, num_ranks: int) -> None:
    """Raises BadFrame if no keeper of one of so many ranks sends this."""
    if not 0 <= rank < num_ranks:
        raise BadFrame(f"a message of a rank {rank}")
    words = payload.removeprefix(b"asked ").removeprefix(b"late ").split(b" ")
    if kind == EXIT:
        if len(words) not in (3, 4) or words[0] not in _ENDINGS or number(words[1]) > 255:
            raise BadFrame(f"the end of a rank, {payload[:40]!r}")
        used_and_all = words[2].split(b"/") if len(words) == 4 else []
        if len(used_and_all) != (2 if words[0] == b"shm" else 0):
            raise BadFrame(f"the end of a rank, {payload[:40]!r}")
        for word in (*used_and_all, words[-1]):
            number(word)
    elif kind == CLOSED:
        number(words[-1] if len(words) == 2 else b"")
    elif kind == SIGNALLED:
        if len(words) != 3 or not words[2].isalpha():
            raise BadFrame(f"a message of a signal, {payload[:40]!r}")
        for word in words[:2]:
            number(word)
    elif kind == NOTE:
        if not is_valid(payload):
            raise BadFrame(f"a note of the kind {payload[:1]!r} and {len(payload)} bytes")
    elif kind not in _OF_KEEPERS:
        raise BadFrame(f"a message of the kind {kind!r}")


def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """The bytes that have arrived, and the file descriptors that came with them."""
    fds: list[int] = []
    data, ancillary, _, _ = sock.recvmsg(CHUNK, socket.CMSG_SPACE(4 * INT.size))
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            whole = len(content) - len(content) % INT.size
            fds += [fd for (fd,) in INT.iter_unpack(content[:whole])]
    for fd in fds:
        os.set_inheritable(fd, False)
    return data, fds


def send_some(sock: socket.socket, message: bytes | bytearray, fds: Iterable[int] = ()) -> int:
    """How much of it was sent, at least one byte; the descriptors go with the first."""
    rights = b"".join(INT.pack(fd) for fd in fds)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else []
    return sock.sendmsg([message], ancillary)


def send(sock: socket.socket, message: bytes, fds: Iterable[int] = ()) -> None:
    sent = send_some(sock, message, fds)
    if sent < len(message):
        sock.sendall(message[sent:])


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class Waker:
    """Makes signals readable from `fd`, so that one poll waits for them too."""

    def __init__(self, signals: Iterable[int]) -> None:
        self.fd, writer = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in signals:
            signal.signal(number, lambda *_: None)

    def read(self) -> bytes:
        try:
            return os.read(self.fd, CHUNK)
        except BlockingIOError:
            return b""
