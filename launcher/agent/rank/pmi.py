"""Relays PMI, by which a rank talks to MPI's daemon (MPICH, Intel MPI, Slurm), through the keeper.

A rank that ends without MPI_Finalize leaves the others waiting for it, and these MPIs notice that
only by chance. The relay sees whether the rank has called MPI_Init and MPI_Finalize.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Callable, Mapping

from hvdrun.agent.frames import CHUNK, MPI_BEGUN, MPI_DONE, MPI_JOB, write_all

VARIABLE = "PMI_FD"  # the rank's end: the number of an open file
# The rank's messages of the first and of the last call. Both versions of PMI write a message at
# once; the reader may still get it in parts.
WORDS = ((b"cmd=init ", MPI_BEGUN), (b"cmd=fullinit;", MPI_BEGUN), (b"cmd=finalize", MPI_DONE))
# Before the job's name in the daemon's answers, in both versions of PMI, and after it.
BEFORE_NAME, AFTER_VALUE = (b" kvsname=", b";jobid="), (b" ", b";", b"\n")
# In the name of a temporary file that MPICH 5's daemon makes and offers to the ranks. It leaves it
# after an abort.
TOPOLOGY_FILE = b"/hydra_hwloc_xmlfile_"
LONGEST_ANSWER = 1024
LONGEST = max(len(word) for word, _ in WORDS)


class Relay:
    """Passes on the messages of both sides. Calls `tell` with MPI_BEGUN and MPI_DONE, and with
    MPI_JOB and the job's name."""

    def __init__(
        self, environment: Mapping[str, str], poll: select.poll, tell: Callable[..., None]
    ) -> None:
        self.poll = poll
        self.tell = tell
        self.is_in_mpi = False
        self.seen = b""  # the last bytes that the rank has sent
        self.job = b""  # its name in MPI, once the daemon has told the rank
        self.topology_file = b""  # of the daemon's, if it has one
        self.told = b""  # the last bytes that the daemon has sent, until both are known
        self.other: dict[int, int] = {}  # each of the two ends here → the other one
        self.for_rank: dict[int, int] = {}  # the number that the rank knows → its new end
        number = environment.get(VARIABLE, "")
        if number.isdigit():
            ours, theirs = socket.socketpair()
            self.for_rank[int(number)] = theirs.detach()
            self.of_rank = ours.detach()
            self.other = {self.of_rank: int(number), int(number): self.of_rank}

    def begin(self) -> None:
        """To be called once the rank has its end."""
        for fd in self.for_rank.values():
            os.close(fd)
        for fd in self.other:
            self.poll.register(fd, select.POLLIN)

    def hear(self, ready: set[int]) -> bool:
        """False when the rank has just closed its end, between MPI_Init and MPI_Finalize."""
        for fd in ready & self.other.keys():
            data = b""
            with contextlib.suppress(OSError):
                data = os.read(fd, CHUNK)
                write_all(self.other[fd], data)
            if not data:
                self._close()
                return fd != self.of_rank or not self.is_in_mpi
            if fd == self.of_rank:
                self._look_at(data)
            elif not (self.job and self.topology_file):
                self._look_at_answer(data)
        return True

    def _close(self) -> None:
        """Tells the rank that the daemon is gone. The other way round, the keeper decides when."""
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

    def _look_at_answer(self, data: bytes) -> None:
        self.told = (self.told + data)[-LONGEST_ANSWER:]
        for word in BEFORE_NAME:
            if word in self.told and not self.job:
                self.job = _whole(self.told.partition(word)[2])
                if self.job:
                    self.tell(MPI_JOB, self.job)
        at = self.told.find(TOPOLOGY_FILE)
        if at >= 0:
            self.topology_file = _whole(self.told[self.told.rfind(b"=", 0, at) + 1 :])


def _whole(value: bytes) -> bytes:
    """The value at the begin of this text; nothing if its end has not come yet."""
    ends = [at for mark in AFTER_VALUE if (at := value.find(mark)) > 0]
    return value[: min(ends)] if ends else b""
