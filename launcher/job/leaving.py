"""Ranks that end with 0 while others run: what hvdrun says, and when it ends the job. No clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hvdrun.errors import LaunchError
from hvdrun.job.ranks import Ranks
from hvdrun.job.watcher import Watcher
from hvdrun.reports.failure_report import left_early, run_on

# After a rank has left without MPI_Finalize, the others have this long to leave, too.
LEAVE_S = 3.0
# If some ranks still run this long after another one ended with 0, hvdrun says so.
RUN_ON_S = 60.0
# How long mpirun may take to end after all ranks have ended with 0.
CLOSING_S = 10.0


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
        return self.watcher.error_of(rank) or left_early(*self.ranks.who(rank), after_s)

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
        self.say(run_on(*self.ranks.who(rank), self.ranks.running, now - at))
