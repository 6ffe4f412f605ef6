"""The way between a rank and MPI's daemon (PMI, in MPICH, Intel MPI and Slurm), through the keeper.

A rank that ends without MPI_Finalize leaves the others waiting for it, and these MPIs notice that
only by accident. Here is seen how far the rank has come with MPI.
"""

from __future__ import annotations

import os
import select

from hvdrun.agent.frames import CHUNK, MPI_BEGUN, MPI_DONE, Suppress, write_all

# typing costs 10 ms of each start, and collections.abc as much.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping
else:  # see link
    import _socket as socket

VARIABLE = "PMI_FD"  # the rank's end: the number of an open file
# What the rank says in the first and in the last call. A message is one write, in both versions of
# PMI; the reader may still get it in parts.
WORDS = ((b"cmd=init ", MPI_BEGUN), (b"cmd=fullinit;", MPI_BEGUN), (b"cmd=finalize", MPI_DONE))
LONGEST = max(len(word) for word, _ in WORDS)


class Relay:
    """Passes on what both sides say. `tell` gets MPI_BEGUN and MPI_DONE."""

    def __init__(
        self, environment: Mapping[str, str], poll: select.poll, tell: Callable[[bytes], None]
    ) -> None:
        self.poll = poll
        self.tell = tell
        self.is_in_mpi = False
        self.seen = b""  # the end of what the rank has said
        self.other: dict[int, int] = {}  # the two ends here
        self.for_rank: dict[int, int] = {}  # the number that the rank knows → its new end
        number = environment.get(VARIABLE, "")
        if number.isdigit():
            ours, theirs = socket.socketpair()
            self.for_rank[int(number)] = theirs.detach()
            self.of_rank = ours.detach()
            self.other = {self.of_rank: int(number), int(number): self.of_rank}

    def begin(self) -> None:
        """Once the rank has its end."""
        for fd in self.for_rank.values():
            os.close(fd)
        for fd in self.other:
            self.poll.register(fd, select.POLLIN)

    def hear(self, ready: set[int]) -> None:
        for fd in ready & self.other.keys():
            data = b""
            with Suppress(OSError):
                data = os.read(fd, CHUNK)
                write_all(self.other[fd], data)
            if not data:
                self._close()
                return
            if fd == self.of_rank:
                self._look_at(data)

    def _close(self) -> None:
        """The rank hears that the daemon is gone. The other way round the keeper decides when."""
        for fd in self.other:
            self.poll.unregister(fd)
        os.close(self.of_rank)
        self.other.clear()

    def _look_at(self, data: bytes) -> None:
        self.seen += data
        for word, kind in WORDS:
            if word in self.seen:
                self.seen = self.seen.partition(word)[2]
                self.is_in_mpi = kind == MPI_BEGUN
                self.tell(kind)
        self.seen = self.seen[-LONGEST:]
