"""What is known about the ranks of a job. No clock."""

from __future__ import annotations

from hvdrun.plan.command import Command
from hvdrun.reports.failure_report import Failure


class Ranks:
    def __init__(self, command: Command) -> None:
        self.command = command
        self.num_proc = command.num_proc
        self.started: set[int] = set()
        self.places: dict[int, str] = {}  # rank → its host (see RankStarted)
        self.told_elsewhere: set[str] = set()  # hosts whose ranks may be told of under another name
        self.in_mpi: set[int] = set()  # between MPI_Init and MPI_Finalize, if the MPI shows it
        self.done: set[int] = set()  # after MPI_Finalize
        self.endings: dict[int, str] = {}  # rank → how it ended
        self.well: dict[int, float] = {}  # rank → when it ended with 0
        self.lost: set[int] = set()  # of hosts that are not connected any more
        self.failures: list[Failure] = []  # of ranks that hvdrun did not end
        self.late: list[Failure] = []  # after MPI ended the shim, while no other is known

    def who(self, rank: int) -> tuple[int, str]:
        return rank, self.command.host_of(rank)

    @property
    def have_all_started(self) -> bool:
        return len(self.started) == self.num_proc

    @property
    def not_started(self) -> set[int]:
        return set(range(self.num_proc)) - self.started

    @property
    def running(self) -> int:
        """The number of ranks that have not ended, including those that have not started."""
        return self.num_proc - len(self.endings)

    @property
    def have_all_ended_well(self) -> bool:
        return len(self.well) == self.num_proc

    @property
    def awaited(self) -> set[int]:
        """The ranks that have started, and whose end will be reported."""
        return self.started - self.endings.keys() - self.lost

    def misplaced(self) -> dict[tuple[str, str], list[int]]:
        """The ranks that MPI has started on another host than planned, by (planned, actual)."""
        far = self.command.far
        if far is None:
            return {}
        here = next((s.host.name for s in self.command.shares if s.host.name not in far), "")
        wrong: dict[tuple[str, str], list[int]] = {}
        for rank, host in sorted(self.places.items()):
            planned = self.command.host_of(rank)
            if host != (planned if planned in far else "") and planned not in self.told_elsewhere:
                names = planned, host or here or "hvdrun's own machine"
                wrong.setdefault(names, []).append(rank)
        return wrong

    def lose(self, host: str) -> None:
        self.lost.update(self.command.ranks_of(host))

    def by_host(self) -> dict[str, range]:
        return {s.host.name: self.command.ranks_of(s.host.name) for s in self.command.shares}

    def has_started_on(self, host: str) -> bool:
        return not self.started.isdisjoint(self.command.ranks_of(host))

    def fail(self, failure: Failure, is_ending: bool) -> None:
        """A rank fails by itself. If hvdrun was already ending the job, and not because a rank
        failed, the failure does not count. If MPI had already ended the rank's shim, it counts only
        together with another failure."""
        if self.failures or not (failure.late or is_ending):
            self.failures += [*self.late, failure]
            self.late.clear()
        elif failure.late:
            self.late.append(failure)

    def first_that_left(self) -> tuple[int, float] | None:
        """The first rank that ended with 0 between MPI_Init and MPI_Finalize while others are in
        MPI, and the time when the last such rank left. The others need all ranks: in a collective,
        or at the latest in MPI_Finalize. (For ranks that ended before MPI_Init see `watcher`.)
        """
        early = self._left_early
        if not early or not self.in_mpi - self.endings.keys():
            return None
        return early[0], self.well[early[-1]]

    def that_left_before(self, at: float) -> int | None:
        """The first rank that ended with 0 between MPI_Init and MPI_Finalize, if it did by then."""
        early = self._left_early
        return early[0] if early and self.well[early[0]] <= at else None

    @property
    def _left_early(self) -> list[int]:
        """In the order in which they left."""
        return sorted(self.well.keys() & self.in_mpi, key=self.well.__getitem__)

    def last_that_left(self) -> tuple[int, float]:
        """The last rank that ended with 0, and when it did."""
        return max(self.well.items(), key=lambda item: item[1])
