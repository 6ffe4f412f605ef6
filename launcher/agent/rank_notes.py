"""The keeper's end of the way that a rank's notes take. What a rank writes is not trusted."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable

from hvdrun.agent.frames import receive
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
