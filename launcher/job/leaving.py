"""Ranks that leave others waiting: they end with 0, or close MPI's file descriptors, while others
run. What hvdrun says, and when it ends the job. No clock."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from hvdrun.errors import LaunchError
from hvdrun.job.ranks import Ranks
from hvdrun.job.watcher import Watcher
from hvdrun.reports.failure_report import Failure, error, note

# After a rank has left without MPI_Finalize, the others have this long to leave, too.
LEAVE_S = 3.0
# If some ranks still run this long after another one ended with 0, hvdrun says so.
RUN_ON_S = 60.0
# How long mpirun may take to end after all ranks have ended with 0.
CLOSING_S = 10.0
# A rank that has closed its descriptors, and still runs this long after, is spoken of: the others
# may wait for it without an end.
SAY_S = 5.0
# Between hosts: a failure of one rank may seem this much earlier than its cause on another.
TRANSIT_S = 1.0
# MPI does not survive the loss of a connection for longer, and other failures have other causes.
WINDOW_S = 60.0
# SIGABRT, SIGBUS, SIGSEGV: so MPICH's libraries end a process that has lost a connection.
_CRASHES = ("signal 6", "signal 7", "signal 11")


def may_be_of_mpi(failure: Failure) -> bool:
    """Whether an MPI may end a rank so, or crash in it, because it misses another one."""
    return failure.ended.startswith("code ") or failure.ended in _CRASHES


class Leaving:
    """`start`: when the job began. `say` gets a line to show; `fail` the time and the error that
    ends the job; `end` the time and the grace with which what is left is ended."""

    def __init__(
        self,
        ranks: Ranks,
        watcher: Watcher,
        start: float,
        say: Callable[[str], None],
        fail: Callable[[float, LaunchError], None],
        end: Callable[[float, float], None],
    ) -> None:
        self.ranks = ranks
        self.watcher = watcher
        self.start = start
        self.say = say
        self.fail = fail
        self.end = end
        self.closing_at: float | None = None  # all ranks ended with 0: when the rest is ended
        self.run_on_said = False

    def on_left(self, now: float, rank: int, at: float) -> None:
        """The rank has ended with 0."""
        ranks = self.ranks
        ranks.well[rank] = at
        if ranks.have_all_ended_well:
            self.closing_at = now + CLOSING_S
            if ranks.in_mpi:  # the keepers hold them, so that MPI does not end the others
                self.end(now, 0)

    def error_of(self, rank: int) -> LaunchError:
        """The error about a rank that has left too early."""
        after_s = self.ranks.well[rank] - self.start
        early = error("left early", *self.ranks.who(rank), after_s=after_s)
        return self.watcher.error_of(rank) or early

    def deadlines(self) -> Iterator[tuple[float, Callable[[float], None]]]:
        """The times at which something is due, and what."""
        ranks = self.ranks
        if self.closing_at is not None:
            yield self.closing_at, lambda now: self.end(now, 0)
        if left := ranks.first_that_left():
            yield left[1] + LEAVE_S, self._left_early
        if ranks.well and ranks.running and not self.run_on_said:
            yield ranks.last_that_left()[1] + RUN_ON_S, self._run_on

    def _left_early(self, now: float) -> None:
        """The others may wait for it for ever, and MPI may not notice."""
        left = self.ranks.first_that_left()
        assert left is not None
        self.fail(now, self.error_of(left[0]))

    def _run_on(self, now: float) -> None:
        self.run_on_said = True
        rank, at = self.ranks.last_that_left()
        left = self.ranks.running
        others = "1 other rank still runs" if left == 1 else f"{left} other ranks still run"
        who = self.ranks.who(rank)
        self.say(note("ranks run on", *who, since_s=now - at, others=others))


class ClosedFiles:
    """Ranks that have closed file descriptors that they do not know, MPI's among them: which, and
    whether another rank failed of it."""

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
        if failure.rank not in lost and failure.ended not in _CRASHES:
            return None
        failed_at = begin + failure.after_s
        before = [
            rank
            for rank, at in self.at.items()
            if rank != failure.rank and failed_at - WINDOW_S <= at <= failed_at + TRANSIT_S
        ]
        return min(before, key=self.at.__getitem__, default=None)
