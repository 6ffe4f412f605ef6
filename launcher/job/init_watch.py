"""Watches ranks that wait in hvd.init() or MPI_Init for others: says which are missing and what
those do, and ends the job if one that is missing has ended. Also says where the ranks are if all
have called hvd.init() and it does not end. No clock.

Notes of hvdlite say when hvd.init() begins and ends, under every MPI. For programs that start MPI
by themselves, PMI shows the beginning of MPI_Init under some MPIs. No rank passes MPI_Init before
all have begun it, so this is enough to know who waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from hvdrun.errors import LaunchError
from hvdrun.job.ranks import Ranks
from hvdrun.knobs import KNOBS
from hvdrun.machine.notes import INIT_BEGUN, INIT_DONE, INIT_FAILED
from hvdrun.reports.failure_report import left_early
from hvdrun.reports.init_report import (
    ENDED,
    NO_ANSWER,
    NOT_STARTED,
    Missing,
    gathered,
    left_before_init,
    not_in_init,
    waiting,
    what_they_do,
)
from hvdrun.reports.looks import Look, read_look

# The first report comes after this time, or after the stall check's warning time if that is less;
# each pause between two is twice as long as the one before, up to the longest.
FIRST_S = 10.0
LONGEST_PAUSE_S = 600.0
# This long before the first report, the ranks are looked at once, to know what they use of a core.
SAMPLE_S = 1.0
# A host has this long to answer.
ANSWER_S = 2.0
# A rank that has ended with 0 while others wait for it in init ends the job after this time.
LEFT_S = 5.0
# No more ranks are asked what they do.
MOST_ASKED = 32

HVD_INIT, MPI_INIT = "hvd.init()", "MPI_Init"


class Limits(NamedTuple):
    first_s: float | None  # until the first report; None: there are no reports
    shutdown_s: float  # until the job ends; 0: never


def limits(environ: Mapping[str, str]) -> Limits:
    """As the ranks' stall check has them: from the variables that the ranks get. A value that can't
    be parsed is an error of hvd.init(), and here like one that is not set."""
    values: dict[str, object] = {}
    for knob in KNOBS:
        values[knob.name] = knob.default
        text = environ.get(knob.variable, environ.get(knob.horovod) if knob.horovod else None)
        if text is not None:
            with contextlib.suppress(ValueError):
                values[knob.name] = knob.parse(text)
    if values["stall_check_disable"]:
        return Limits(None, 0)
    warning_s = float(str(values["stall_check_time_seconds"]))
    shutdown_s = float(str(values["stall_shutdown_time_seconds"]))
    return Limits(min(FIRST_S, warning_s) if warning_s else None, shutdown_s)


class InitWatch:
    """`start`: when the job began; `cwd`: its folder. `say` gets lines to show; `look` gets ranks
    whose keepers are to be asked what they do, and whether for their stacks, too, and the answers
    come to `on_look`; `fail` gets the time and the error that ends the job."""

    def __init__(
        self,
        ranks: Ranks,
        limits: Limits,
        start: float,
        cwd: str,
        say: Callable[[str], None],
        look: Callable[[tuple[int, ...], bool], None],
        fail: Callable[[float, LaunchError], None],
    ) -> None:
        self.ranks = ranks
        self.limits = limits
        self.start = start
        self.cwd = cwd
        self.say = say
        self.look = look
        self.fail = fail
        self.begun: dict[int, int] = {}  # rank → how many calls of hvd.init() have begun
        self.since: dict[int, float] = {}  # ranks in hvd.init(), or that have begun MPI_Init
        self.in_init: set[int] = set()  # the ranks in hvd.init()
        self.closed: set[int] = set()  # the ranks that may have closed the way for notes
        self.failed: set[int] = set()  # the ranks whose last hvd.init() has raised an error
        # What follows is of one wait: from the first rank that waits until none does.
        self.waits: set[int] = set()
        self.missing: set[int] = set()
        self.where = MPI_INIT
        self.all_called = False  # it is the end of hvd.init() that they wait for
        self.begin: float | None = None
        self._forget()

    def _forget(self) -> None:
        self.pause_s = self.limits.first_s or 0.0
        self.sample_at: float | None = None
        self.report_at: float | None = None
        self.asked_at: float | None = None  # the answers are for a report
        self.questioned: set[int] = set()  # by the last question
        self.asked: set[int] = set()  # those of them of which no answer has come
        self.looks: dict[int, tuple[Look | None, Look]] = {}  # the last two of each rank
        self.said = False

    # ------------------------------------------------------------ what happens

    def on_note(self, now: float, rank: int, kind: bytes) -> None:
        if kind == INIT_BEGUN:
            self.begun[rank] = self.begun.get(rank, 0) + 1
            self.in_init.add(rank)
            self.failed.discard(rank)
            self.since[rank] = now
        elif kind in (INIT_DONE, INIT_FAILED) and rank in self.in_init:
            self.in_init.discard(rank)
            if kind == INIT_FAILED:  # it may call it again
                self.begun[rank] -= 1
                self.failed.add(rank)
        self.update(now, all_came=kind == INIT_DONE)

    def on_mpi(self, now: float, rank: int) -> None:
        """The rank has begun MPI_Init."""
        self.since.setdefault(rank, now)
        self.update(now)

    def on_look(self, now: float, rank: int, data: bytes) -> None:
        look = read_look(data)
        if look is None or rank not in self.asked:
            return
        before = self.looks.get(rank)
        self.looks[rank] = (before[1] if before else None, look)
        if self.asked_at is not None and look.frames is None:
            return  # late, to the question before
        self.asked.discard(rank)
        if not self.asked and self.asked_at is not None:
            self._report(now)

    def update(self, now: float, all_came: bool = False) -> None:
        """To be called when the state of a rank has changed. all_came: one is through init, so all
        have come, also those that can't tell."""
        were_missing = self.missing
        self.waits, self.missing = set(), set()
        in_mpi = self.ranks.in_mpi | self.ranks.done
        everyone = range(self.ranks.num_proc)
        never = {r for r in everyone if r not in in_mpi and not self.begun.get(r)}
        for rank in self.since.keys() - self.ranks.endings.keys():
            if rank in self.in_init:
                lacks = {r for r in everyone if self.begun.get(r, 0) < self.begun[rank]}
            elif rank in self.ranks.in_mpi and not self.begun.get(rank):
                lacks = never
            else:
                continue
            if lacks:
                self.waits.add(rank)
                self.missing |= lacks
        inside = self.in_init - self.ranks.endings.keys() - self.closed
        all_called = not self.waits and bool(inside)
        if all_called:
            self.waits, self.missing = set(inside), set(inside)
        if self.begin is not None and (not self.waits or all_called != self.all_called):
            if self.said and (all_called or all_came or not were_missing & never):
                self.say(gathered(self.where, now - self.begin, self.all_called))
            self.begin = None
            self._forget()
        self.all_called = all_called
        if self.waits:
            self.where = HVD_INIT if self.waits & self.in_init else MPI_INIT
        if self.waits and self.begin is None:
            self.begin = now if all_called else min(self.since[rank] for rank in self.waits)
            if self.limits.first_s is not None:
                self.report_at = self.begin + self.limits.first_s
                self.sample_at = max(self.begin, self.report_at - SAMPLE_S)
        else:
            self.asked &= self.missing

    # ------------------------------------------------------------ what is due

    def deadlines(self) -> Iterator[tuple[float, Callable[[float], None]]]:
        """The times at which something is due, and what."""
        if self.begin is None:
            return
        if left := self._left():
            yield (
                max(self.begin, *(self.ranks.well[rank] for rank in left)) + LEFT_S,
                self._end_left,
            )
        if self.limits.shutdown_s:
            yield self.begin + self.limits.shutdown_s, self._shut_down
        if self.asked_at is not None:
            yield self.asked_at + ANSWER_S, self._report
        elif self.sample_at is not None:
            yield self.sample_at, self._sample
        elif self.report_at is not None:
            yield self.report_at, self._ask

    def _left(self) -> list[int]:
        """The missing ranks that have ended with 0, in the order of their ends."""
        return sorted(self.missing & self.ranks.well.keys(), key=self.ranks.well.__getitem__)

    def has_left(self, rank: int) -> bool:
        """Whether others wait in init for this rank, which has ended with 0."""
        return rank in self.missing and rank in self.ranks.well

    def left(self, rank: int) -> LaunchError:
        """The error about a rank that `has_left`."""
        host = self.ranks.command.host_of(rank)
        after_s = self.ranks.well[rank] - self.start
        if self.begun.get(rank):  # others call it once more
            return left_early(rank, host, after_s)
        return left_before_init(rank, host, after_s, self.waits, self.where)

    def _end_left(self, now: float) -> None:
        self.fail(now, self.left(self._left()[0]))

    def _shut_down(self, now: float) -> None:
        hosts = {rank: self.ranks.command.host_of(rank) for rank in sorted(self.missing)}
        waits = () if self.all_called else self.waits
        self.fail(now, not_in_init(waits, hosts, self.where, self.limits.shutdown_s))

    def _running(self) -> set[int]:
        """The missing ranks of which a keeper can tell more."""
        return self.missing & self.ranks.started - self.ranks.endings.keys()

    def _sample(self, now: float) -> None:
        self.sample_at = None
        self._send(with_stack=False)

    def _ask(self, now: float) -> None:
        self.asked_at = now
        self._send(with_stack=True)
        if not self.asked:
            self._report(now)

    def _send(self, with_stack: bool) -> None:
        self.questioned = set(sorted(self._running())[:MOST_ASKED])
        self.asked = set(self.questioned)
        if self.asked:
            self.look(tuple(sorted(self.asked)), with_stack)

    def _report(self, now: float) -> None:
        assert self.begin is not None
        self.asked_at = None
        self.said = True
        not_asked = self._running() - self.questioned
        missing = {rank: self._seen(rank) for rank in sorted(self.missing - not_asked)}
        lines = what_they_do(missing, self.cwd, self.where == HVD_INIT, len(not_asked))
        where, shutdown_s = self.where, self.limits.shutdown_s
        waits = () if self.all_called else self.waits
        self.say(waiting(waits, self.missing, where, now - self.begin, lines, shutdown_s))
        self.report_at = now + self.pause_s
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)

    def _seen(self, rank: int) -> Missing:
        host = self.ranks.command.host_of(rank)
        if rank in self.ranks.well:
            return Missing(host, instead=ENDED)
        if rank not in self.ranks.started:
            return Missing(host, instead=NOT_STARTED)
        if rank in self.asked or rank not in self.looks:
            return Missing(host, instead=NO_ANSWER)
        return Missing(host, *self.looks[rank], failed=rank in self.failed)
