"""Watches ranks that wait for others: asks where all of them are, and says it. No clock.

Ranks wait in hvd.init(), which their notes tell, or in MPI_Init of a program that starts MPI by
itself, which PMI tells under some MPIs; or in an operation, which their stall checks report; or
somebody asks where they are. The answer is found in one way: their keepers are asked
what the ranks do, and half a second later again, and where they are in their Python code.

A rank that never calls hvd.init() or MPI_Init keeps the others there. The job ends if such a rank
has ended, or once the stall check's shutdown time is over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from hvdrun.errors import LaunchError
from hvdrun.job.ranks import Ranks, Recorded
from hvdrun.knobs import KNOBS
from hvdrun.machine.notes import INIT_BEGUN, INIT_DONE, INIT_FAILED
from hvdrun.reports import whereabouts
from hvdrun.reports.failure_report import error, named
from hvdrun.reports.looks import Look, read_look
from hvdrun.reports.whereabouts import HVD_INIT, MPI_INIT, Seen, Stall

# Between the two questions, so that it is known how much a rank has computed in between.
SAMPLE_S = 0.5
# A host has this long to answer the second one.
ANSWER_S = 5.0
# The first report on a wait in init comes after this time, or after the stall check's warning time
# if that is less; each pause between two is twice as long as the one before, up to the longest.
FIRST_S = 10.0
LONGEST_PAUSE_S = 600.0
# A rank that has ended with 0 while others wait for it in init ends the job after this time.
LEFT_S = 5.0
# After a report of the stall check, others are not answered for so long: many operations may wait,
# and what the ranks have recorded is kept for one inquiry only.
STALL_PAUSE_S = SAMPLE_S + ANSWER_S
# A report shows no more ranks, those that others wait for first.
MOST_RANKS = 32
# The same for the answer to somebody who asks where all are.
MOST_ASKED = 256

Then = Callable[[float, dict[int, Seen]], None]


class Limits(NamedTuple):
    first_s: float | None  # until the first report on a wait in init; None: there are no reports
    shutdown_s: float  # until the job ends; 0: never


def limits(environ: Mapping[str, str]) -> Limits:
    """As the ranks' stall check has them: from the variables that the ranks get. A value that can't
    be parsed is an error of hvd.init(), and here like one that is not set."""
    values: dict[str, Any] = {}
    for knob in (knob for knob in KNOBS if knob.name.startswith("stall_")):
        values[knob.name] = knob.default
        with contextlib.suppress(ValueError):
            text = environ.get(knob.variable, environ.get(knob.horovod))
            values[knob.name] = knob.default if text is None else knob.parse(text)
    if values["stall_check_disable"]:
        return Limits(None, 0)
    warning_s = values["stall_check_time_seconds"]
    first_s = min(FIRST_S, warning_s) if warning_s else None
    return Limits(first_s, values["stall_shutdown_time_seconds"])


@dataclass
class _Inquiry:
    """then: gets the time and what was seen, once all have answered or ANSWER_S have passed. Of
    ranks that do not run, nothing is seen. due_at: of the second question, then of the end."""

    ranks: tuple[int, ...]
    due_at: float
    then: Then
    with_boxes: bool
    has_asked_again: bool = False
    pending: set[int] = field(default_factory=set)
    before: dict[int, Look] = field(default_factory=dict)
    now: dict[int, Look] = field(default_factory=dict)


@dataclass
class _Wait:
    """In HVD_INIT or MPI_INIT. waits: the ranks that wait for the missing ones; empty if all have
    called it, and the missing ones are those that are still in it."""

    where: str
    begin: float
    waits: set[int]
    missing: set[int]
    ask_at: float | None = None
    pause_s: float = 0.0
    said: bool = False


class Watcher:
    """`start`: when the job began; `cwd`: its folder. `say` gets lines to show; `look` gets ranks
    whose keepers are to be asked, and whether for their stacks, too, and for their black boxes, and
    the answers come to `on_look`; `fail` gets the time and the error that ends the job."""

    def __init__(
        self,
        ranks: Ranks,
        recorded: Recorded,
        limits: Limits,
        start: float,
        cwd: str,
        say: Callable[[str], None],
        look: Callable[[tuple[int, ...], bool, bool], None],
        fail: Callable[[float, LaunchError], None],
    ) -> None:
        self.ranks = ranks
        self.recorded = recorded
        self.limits = limits
        self.start = start
        self.cwd = cwd
        self.say = say
        self.look = look
        self.fail = fail
        self.is_over = False  # the job is being ended: no rank waits for another one any more
        self.inquiries: list[_Inquiry] = []
        self.silent_until = float("-inf")  # about operations
        self.others: set[int] = set()  # ranks whose number in hvdlite's world is not the job's
        self.calls: dict[int, int] = {}  # of hvd.init() that have begun, by rank
        self.in_init: dict[int, float] = {}  # the ranks in it, and since when
        self.mpi_begun: dict[int, float] = {}  # the ranks that have begun MPI_Init, and when
        self.failed: set[int] = set()  # the ranks whose last hvd.init() has raised an error
        self.closed: set[int] = set()  # the ranks that may have closed the way for notes
        self.wait: _Wait | None = None

    # ------------------------------------------------------------ what happens

    def on_note(self, now: float, rank: int, kind: bytes, data: bytes) -> None:
        """hvd.init() has begun, has ended (as rank and size of the world, the data says), or has
        raised an error."""
        if kind == INIT_BEGUN:
            self.calls[rank] = self.calls.get(rank, 0) + 1
            self.in_init[rank] = now
            self.failed.discard(rank)
        elif self.in_init.pop(rank, None) is not None and kind == INIT_FAILED:
            self.calls[rank] -= 1  # it may call it again
            self.failed.add(rank)
        if kind == INIT_DONE and data.split() not in ([], [b"%d" % rank, b"%d" % self.size]):
            self.others.add(rank)
        self.update(now, all_came=kind == INIT_DONE)

    def on_mpi(self, now: float, rank: int) -> None:
        """The rank has begun MPI_Init."""
        self.mpi_begun.setdefault(rank, now)
        self.update(now)

    def on_stall(self, now: float, data: bytes) -> None:
        """A rank's stall check reports an operation."""
        if self.is_over or now < self.silent_until:
            return
        self.silent_until = now + STALL_PAUSE_S
        stall = whereabouts.read_stall(data.decode(errors="replace"), self.size)
        if self.others or not stall.missing:
            stall = Stall(stall.operation)
        named = (*stall.missing, *stall.waiting) or tuple(sorted(self.ranks.started))
        self.recorded.forget_running()
        rest = max(0, len(named) - MOST_RANKS)
        self._ask(now, named[:MOST_RANKS], partial(self._say_stall, stall, rest), with_boxes=True)

    def on_question(self, now: float, answer: Callable[[str], None]) -> None:
        """Somebody wants to know where all ranks are."""
        self._ask(now, range(self.size)[:MOST_ASKED], partial(self._answer, answer))

    def on_look(self, now: float, rank: int, data: bytes) -> None:
        if (found := read_look(data)) is None:
            return
        for inquiry in list(self.inquiries):
            if rank in inquiry.pending and found.frames is not None:
                inquiry.now[rank] = found
                inquiry.pending.discard(rank)
                self._end_if_complete(now, inquiry)
            elif rank in inquiry.ranks and rank not in inquiry.now:
                # The first one: a later one may be for another inquiry, and just before the last.
                inquiry.before.setdefault(rank, found)

    def on_closed_files(self, now: float, rank: int) -> None:
        self.closed.add(rank)
        self.update(now)

    def update(self, now: float, all_came: bool = False) -> None:
        """To be called when the state of a rank has changed. all_came: one is through init, so all
        have come, also those that can't tell."""
        for inquiry in list(self.inquiries):
            if inquiry.has_asked_again:
                inquiry.pending.intersection_update(self._running(inquiry.ranks))
                self._end_if_complete(now, inquiry)
        if self.is_over:
            return
        where, since = HVD_INIT, self.in_init
        inside = self.in_init.keys() - self.ranks.endings.keys()
        most = max((self.calls[rank] for rank in inside), default=0)
        missing = {rank for rank in range(self.size) if self.calls.get(rank, 0) < most}
        waits = {rank for rank in inside if self.calls[rank] == most} if missing else set()
        missing = missing or inside - self.closed
        never = self._never_in_init()
        if never and not missing:  # nobody is in hvd.init()
            waits = self.ranks.in_mpi - self.calls.keys() - self.ranks.endings.keys()
            where, since, missing = MPI_INIT, self.mpi_begun, never if waits else set()
        before = self.wait
        if before and missing and bool(before.waits) == bool(waits):
            before.where, before.waits, before.missing = where, waits, missing
            return
        if before and before.said:
            have_begun = before.where == MPI_INIT and not before.missing & never
            if all_came or have_begun or (missing and not waits):
                has_ended = not before.waits
                self.say(whereabouts.gathered(before.where, now - before.begin, has_ended))
        self.wait = None
        if missing:
            begin = min(since[rank] for rank in waits) if waits else now
            self.wait = _Wait(where, begin, waits, missing)
            if self.limits.first_s is not None:
                self.wait.pause_s = self.limits.first_s
                self.wait.ask_at = max(begin, begin + self.limits.first_s - SAMPLE_S)

    def _never_in_init(self) -> set[int]:
        """The ranks that have begun neither hvd.init() nor MPI_Init."""
        begun = self.ranks.in_mpi | self.ranks.done
        return {r for r in range(self.size) if r not in begun and not self.calls.get(r)}

    # ------------------------------------------------------------ what is due

    def deadlines(self) -> Iterator[tuple[float, Callable[[float], None]]]:
        """The times at which something is due, and what."""
        for inquiry in self.inquiries:
            due = self._end if inquiry.has_asked_again else self._ask_again
            yield inquiry.due_at, partial(due, inquiry)
        wait = self.wait
        if wait is None or self.is_over:
            return
        if left := self._left(wait):
            at = max(wait.begin, *(self.ranks.well[rank] for rank in left)) + LEFT_S
            yield at, partial(self._end_left, wait)
        if self.limits.shutdown_s:
            yield wait.begin + self.limits.shutdown_s, partial(self._shut_down, wait)
        if wait.ask_at is not None:
            yield wait.ask_at, partial(self._ask_missing, wait)

    def _left(self, wait: _Wait) -> list[int]:
        """The missing ranks that have ended with 0, in the order of their ends."""
        return sorted(wait.missing & self.ranks.well.keys(), key=self.ranks.well.__getitem__)

    def _end_left(self, wait: _Wait, now: float) -> None:
        self.fail(now, self._error_of(self._left(wait)[0], wait))

    def error_of(self, rank: int) -> LaunchError | None:
        """The error about a rank that has ended with 0, if others wait for it in init."""
        if self.wait and rank in self._left(self.wait):
            return self._error_of(rank, self.wait)
        return None

    def _error_of(self, rank: int, wait: _Wait) -> LaunchError:
        who, after_s = self.ranks.who(rank), self.ranks.well[rank] - self.start
        if self.calls.get(rank):  # others call it once more
            return error("left early", *who, after_s=after_s)
        waits = named(wait.waits)
        return error("left before init", *who, after_s=after_s, where=wait.where, waits=waits)

    def _shut_down(self, wait: _Wait, now: float) -> None:
        hosts = dict(map(self.ranks.who, sorted(wait.missing)))
        limit_s = self.limits.shutdown_s
        self.fail(now, whereabouts.not_in_init(wait.where, wait.waits, hosts, limit_s))

    def _ask_missing(self, wait: _Wait, now: float) -> None:
        wait.ask_at = None
        missing = self._running(sorted(wait.missing))[:MOST_RANKS]
        self._ask(now, missing, partial(self._say_wait, wait))

    # ------------------------------------------------------------ asking

    @property
    def size(self) -> int:
        return self.ranks.num_proc

    def _running(self, ranks: Iterable[int]) -> tuple[int, ...]:
        return tuple(r for r in ranks if r in self.ranks.started and r not in self.ranks.endings)

    def _ask(self, now: float, ranks: Iterable[int], then: Then, with_boxes: bool = False) -> None:
        inquiry = _Inquiry(self._running(ranks), now + SAMPLE_S, then, with_boxes)
        self.inquiries.append(inquiry)
        if inquiry.ranks:
            self.look(inquiry.ranks, False, False)

    def _ask_again(self, inquiry: _Inquiry, now: float) -> None:
        inquiry.has_asked_again, inquiry.due_at = True, now + ANSWER_S
        inquiry.pending = set(self._running(inquiry.ranks))
        if inquiry.pending:
            self.look(tuple(sorted(inquiry.pending)), True, inquiry.with_boxes)
        self._end_if_complete(now, inquiry)

    def _end_if_complete(self, now: float, inquiry: _Inquiry) -> None:
        if not inquiry.pending:
            self._end(inquiry, now)

    def _end(self, inquiry: _Inquiry, now: float) -> None:
        self.inquiries.remove(inquiry)
        seen = {
            rank: Seen(
                self.ranks.command.host_of(rank), inquiry.before.get(rank), inquiry.now.get(rank)
            )
            for rank in self._running(inquiry.ranks)
        }
        inquiry.then(now, seen)

    # ------------------------------------------------------------ saying

    def _say_wait(self, wait: _Wait, now: float, seen: dict[int, Seen]) -> None:
        if wait is not self.wait or self.is_over:
            return
        missing = {rank: self._missing(rank, seen) for rank in sorted(wait.missing)}
        shown = {rank: each for rank, each in missing.items() if each is not None}
        head = whereabouts.in_init(
            wait.where, wait.waits, wait.missing, now - wait.begin, self.limits.shutdown_s
        )
        self._say_where(head, shown, len(missing) - len(shown), where=wait.where)
        wait.said = True
        wait.ask_at = now + wait.pause_s - SAMPLE_S
        wait.pause_s = min(2 * wait.pause_s, LONGEST_PAUSE_S)

    def _missing(self, rank: int, seen: Mapping[int, Seen]) -> Seen | None:
        """None: it was not asked."""
        host, failed = self.ranks.command.host_of(rank), rank in self.failed
        if rank in self.ranks.well:
            return Seen(host, note=whereabouts.ENDED)
        if rank not in self.ranks.started:
            return Seen(host, note=whereabouts.NOT_STARTED)
        found = seen.get(rank)
        if found and found.now and failed:
            return found._replace(note=whereabouts.FAILED)
        return found

    def _say_stall(self, stall: Stall, rest: int, _: float, seen: dict[int, Seen]) -> None:
        if self.is_over or not seen:
            return
        answered = [rank for rank, each in seen.items() if each.now is not None]
        orders = self.recorded.take_orders(answered)
        self._say_where(stall.head, seen, rest, stall.missing, orders)

    def _say_where(
        self,
        head: str,
        seen: Mapping[int, Seen],
        rest: int,
        apart: Collection[int] = (),
        more: Iterable[str] = (),
        where: str = "",
    ) -> None:
        lines = whereabouts.entries(seen, self.cwd, rest, apart, where)
        self.say("\n".join([f"hvdrun: {head}:", *lines, *more]))

    def _answer(self, answer: Callable[[str], None], _: float, seen: dict[int, Seen]) -> None:
        head = f"{self.size} ranks"
        if ended := len(self.ranks.endings):
            head += f", {ended} of which {'has' if ended == 1 else 'have'} ended"
        lines = whereabouts.entries(seen, self.cwd, max(0, self.size - MOST_ASKED))
        answer("\n".join([f"{head}:", *lines]))
