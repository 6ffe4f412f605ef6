"""The keeper's end of the way that a rank's notes take, and of its black box: the memory in which
the rank keeps its last operations (the rank's end: `hvdlite.world.telling`). It outlives the rank,
as the keeper has it too.

What a rank writes is not trusted. Of the black box this only copies entries, which
`reports.black_box` reads.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import struct
import time
import zlib
from collections.abc import Callable

from hvdrun.agent.frames import receive
from hvdrun.machine.box_layout import ENTRY_BYTES, HEAD_BYTES, TOTAL_BYTES, lines_in
from hvdrun.machine.notes import VARIABLE, address, is_valid

# A rank that writes more, and one more each second, has gone mad: the keeper stops listening.
MOST_NOTES = 10_000


class RankNotes:
    """Calls `tell` with each valid note and the descriptors that came with it, which `tell` closes
    or keeps."""

    def __init__(
        self,
        environment: dict[str, str],
        poll: select.poll,
        tell: Callable[[bytes, list[int]], None],
    ) -> None:
        """Adds the variable to the rank's environment."""
        self.poll = poll
        self.tell = tell
        self.heard = 0
        self.begun_s = time.monotonic()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self.ours: socket.socket | None = ours
        self.theirs = theirs
        os.set_inheritable(theirs.fileno(), True)
        environment[VARIABLE] = address(theirs.fileno())

    def begin(self) -> None:
        """To be called once the rank has its end."""
        self.theirs.close()
        assert self.ours is not None
        self.poll.register(self.ours, select.POLLIN)

    def hear(self) -> bool:
        """Takes all notes that have arrived. False when the rank has just closed its end."""
        while self.ours is not None:
            note = b""
            fds: list[int] = []
            with contextlib.suppress(OSError):
                try:
                    note, fds = receive(self.ours)
                except BlockingIOError:
                    return True
            self.heard += 1
            if not note or self.heard > MOST_NOTES + time.monotonic() - self.begun_s:
                self.poll.unregister(self.ours)
                self.ours.close()
                self.ours = None
                return bool(note)
            if is_valid(note):
                self.tell(note, fds)
            else:
                for fd in fds:
                    os.close(fd)
        return True


# What follows a rank that has ended well: a later failure of others may come from its leaving.
FEW = 32

_TICKET = struct.Struct("=Q")
_GET_SEALS = 1034  # fcntl's F_GET_SEALS, which files in memory alone have


class RankBox:
    def __init__(self) -> None:
        self.fd: int | None = None

    def keep(self, fd: int) -> None:
        """Instead of an earlier one. Closes what is no memory: reading it could take for ever."""
        try:
            fcntl.fcntl(fd, _GET_SEALS)
        except OSError:
            os.close(fd)
            return
        if self.fd is not None:
            os.close(self.fd)
        self.fd = fd

    def read(self, all_of_them: bool) -> bytes:
        """The text at its begin, a NUL, where the script has waited last, a NUL, and the last
        entries in their order, all of it compressed. Empty if there are none. The rank may run on:
        of an entry whose ticket has changed since it was read, it was writing."""
        if self.fd is None:
            return b""
        data = later = b""
        with contextlib.suppress(OSError):
            data = os.pread(self.fd, TOTAL_BYTES, 0)
            later = os.pread(self.fd, TOTAL_BYTES, 0)
        head = data[:HEAD_BYTES].partition(b"\0")[0]
        found = []
        for at in range(HEAD_BYTES, len(data) - ENTRY_BYTES + 1, ENTRY_BYTES):
            (ticket,) = _TICKET.unpack_from(data, at)
            # 0: it was being written when the rank was killed, or never.
            if ticket and later[at : at + _TICKET.size] == data[at : at + _TICKET.size]:
                found.append((ticket, at))
        if not found:
            return b""
        found.sort()
        last = found if all_of_them else found[-FEW:]
        entries = b"".join(data[at : at + ENTRY_BYTES] for _, at in last)
        lines = lines_in(data, zlib.crc32)
        return zlib.compress(b"\0".join((head, lines, entries)), 6)

    def lines(self) -> str:
        """Where the script has waited for hvdlite last, in faulthandler's form."""
        data = b""
        if self.fd is not None:
            with contextlib.suppress(OSError):
                data = os.pread(self.fd, TOTAL_BYTES, 0)
        return lines_in(data, zlib.crc32).decode(errors="replace")
