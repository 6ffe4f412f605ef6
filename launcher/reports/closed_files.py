"""Ranks that have closed file descriptors that they do not know, MPI's among them: what is said of
that, and whether another rank failed of it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from hvdrun.errors import MpirunFailed
from hvdrun.reports.failure_report import Failure, duration

# A rank that still runs this long after is spoken of: the others may wait for it without an end.
SAY_S = 5.0
# Between hosts: a failure of one rank may seem this much earlier than its cause on another.
TRANSIT_S = 1.0
# MPI does not survive the loss of a connection for longer, and other failures have other causes.
WINDOW_S = 60.0
# SIGABRT, SIGBUS, SIGSEGV: so MPICH's libraries end a process that has lost a connection.
CRASHES = ("signal 6", "signal 7", "signal 11")
ADVICE = (
    "a program must close only descriptors that it has opened itself (see os.closerange,"
    " subprocess's close_fds, libraries for daemons)"
)


class ClosedFiles:
    def __init__(self) -> None:
        self.at: dict[int, float] = {}  # rank → when it did so
        self.said: set[int] = set()

    def to_say(self, running: Collection[int]) -> Iterator[tuple[float, int]]:
        """When a line about which of these ranks is due."""
        for rank in sorted(self.at.keys() - self.said):
            if rank in running:
                yield self.at[rank] + SAY_S, rank

    def cause_of(self, failure: Failure, lost: Collection[int], begin: float) -> int | None:
        """The rank whose closing made another one fail. `lost`: the ranks that Open MPI ended
        because a connection to another rank was closed."""
        if failure.rank not in lost and failure.ended not in CRASHES:
            return None
        failed_at = begin + failure.after_s
        before = [
            rank
            for rank, at in self.at.items()
            if rank != failure.rank and failed_at - WINDOW_S <= at <= failed_at + TRANSIT_S
        ]
        return min(before, key=self.at.__getitem__, default=None)


def runs_on(rank: int, host: str) -> str:
    return (
        f"hvdrun: rank {rank} on {host} has closed its file descriptors, MPI's among them, and runs"
        f" on: the others may wait for it for ever; {ADVICE}"
    )


def it_had_closed(closed_s: float) -> str:
    return (
        f"hvdrun: it had closed its file descriptors {duration(closed_s)} before, MPI's among them;"
        f" {ADVICE}"
    )


def broke_mpi(rank: int, host: str, after_s: float, failure: Failure) -> MpirunFailed:
    return MpirunFailed(
        f"rank {rank} on {host} closed its file descriptors after {duration(after_s)}, MPI's"
        f" connections to other ranks among them, and that ended the job ({failure}); {ADVICE}"
    )


def lost_a_running_rank(rank: int, others: int) -> str:
    which = "the other rank" if others == 1 else "another rank"
    return (
        f"hvdrun: MPI ended rank {rank} because its connection to {which} was closed, and no other"
        f" rank had ended: if one of them closes file descriptors, this is the cause; {ADVICE}"
    )
