"""What is known about the ranks of a job: how far each has come, its last operations, and whether
the job's end is a preempted one's. No clock."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from hvdrun.machine.notes import LARGEST_BYTES
from hvdrun.plan.command import Command
from hvdrun.reports import last_messages, last_operations
from hvdrun.reports.black_box import Box, lines_of, read_box
from hvdrun.reports.failure_report import Failure

# How a rank ended that has left by itself, that hvdrun has ended, or the batch system: Slurm sends
# TERM to the ranks too, and one that is leaving already may die of it.
_IN_ORDER = re.compile(r"(late )?(asked )?code 0|asked signal \d+|signal 15")


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


class Recorded:
    """The ranks' last operations, as their keepers have sent them."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.packed: dict[int, bytes] = {}
        self.read: dict[int, Box] | None = None
        self.running: dict[int, bytes] = {}  # of ranks that run, when they were asked last

    def on_operations(self, rank: int, data: bytes, is_running: bool = False) -> None:
        if not 0 <= rank < self.ranks.num_proc or len(data) > LARGEST_BYTES:
            return
        if is_running:
            self.running[rank] = data
        else:
            self.packed[rank] = data
            self.read = None

    def forget_running(self) -> None:
        """The ranks are about to be asked again."""
        self.running = {}

    def take_orders(self, ranks: Collection[int]) -> tuple[str, ...]:
        """If ranks that have just been asked are in different operations, which each of them has
        not called: what each has called since the last operation that all have ended."""
        packed, self.running = self.running, {}
        most = last_operations.most_compared(len(packed))
        boxes = {
            rank: box
            for rank in sorted(set(ranks) & set(packed))
            if (box := read_box(packed[rank], most)) is not None
        }
        lines = last_operations.orders(boxes, self.ranks.num_proc)
        return (f"hvdrun: {lines[0]}", *lines[1:]) if lines else ()

    def rows(self) -> dict[int, Iterator[str]]:
        """Of these ranks: an operation per line. A rank's are read when its lines are asked for,
        since all of a large job would take much memory at once."""
        return {rank: self._rows_of(rank) for rank in self.boxes()}

    def _rows_of(self, rank: int) -> Iterator[str]:
        if (box := read_box(self.packed[rank])) is not None:
            yield from lines_of(box)

    def boxes(self) -> dict[int, Box]:
        """Of the ranks that have sent one: as much as is compared."""
        if self.read is None:
            most = last_operations.most_compared(len(self.packed))
            boxes = ((rank, read_box(data, most)) for rank, data in sorted(self.packed.items()))
            self.read = {rank: box for rank, box in boxes if box is not None}
        return self.read

    def waited_at(self, rank: int) -> str:
        """The script's line from which it has waited for hvdlite last, as 'train.py:12 in main'."""
        box = self.boxes().get(rank)
        if box is None or not box.waited_at:
            return ""
        file, line, function = box.waited_at[0]
        return f"{file}:{line} in {function}"

    def report(self) -> tuple[str, ...]:
        """What the report on a job that has failed says of them, if anything."""
        boxes = self.boxes()
        lines = last_operations.report(boxes, self._left(), self.ranks.num_proc)
        messages = [f"hvdrun: {line}" for line in last_messages.report(boxes)]
        return (*(f"hvdrun: {line}" for line in lines[:1]), *lines[1:], *messages)

    def awaited_by(self, rank: int) -> set[int]:
        """The ranks that have not called an operation in which this one still was."""
        boxes = self.boxes()
        return last_operations.awaited_by(rank, boxes, self.ranks.num_proc) if boxes else set()

    def _left(self) -> dict[int, str]:
        return dict.fromkeys(self.ranks.well, "ended with exit code 0")

    def summary(self) -> list[str]:
        lines = last_operations.summary(self.boxes(), self._left(), self.ranks.num_proc)
        messages = last_messages.report(self.boxes(), last_messages.MOST_IN_FILE)
        return [*lines, *([""] if lines and messages else []), *messages]


class Preemption:
    """A job that its batch system has told to end. `told`: the ranks in which hvd.preempted() has
    returned True; it does so in all or in none, but for those that have joined."""

    def __init__(self) -> None:
        self.told: set[int] = set()

    def is_the_end_of(self, endings: Mapping[int, str]) -> bool:
        """Whether all ranks have saved and left after that, as far as their exit codes show."""
        return bool(self.told) and all(_code(how) == 0 for how in endings.values())

    def failed(self, endings: Mapping[int, str]) -> int | None:
        """The first rank that ended with an error of its own, as while it saved."""
        wrong = (rank for rank in sorted(endings) if not _IN_ORDER.fullmatch(endings[rank]))
        return next(wrong, None)


def _code(how: str) -> int | None:
    kind, _, number = how.rpartition(" ")
    return int(number) if kind.endswith("code") else None
