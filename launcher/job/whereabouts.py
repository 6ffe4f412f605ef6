"""Asks ranks what they do and where they are in their Python code. No clock.

Each inquiry asks twice: then it is known how much a rank has computed in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from hvdrun.job.ranks import Ranks
from hvdrun.reports.looks import Look, read_look
from hvdrun.reports.stacks import Seen

# Between the two questions.
SAMPLE_S = 0.5
# A host has this long to answer the second one.
ANSWER_S = 5.0

Then = Callable[[float, dict[int, Seen]], None]


class _Inquiry:
    def __init__(
        self, ranks: tuple[int, ...], ask_again_at: float, then: Then, with_boxes: bool
    ) -> None:
        self.ranks = ranks
        self.with_boxes = with_boxes
        self.ask_again_at: float | None = ask_again_at
        self.until = 0.0
        self.then = then
        self.before: dict[int, Look] = {}
        self.now: dict[int, Look] = {}
        self.pending: set[int] = set()


class Whereabouts:
    """`look` gets ranks whose keepers are to be asked, and whether for their stacks, too, and for
    their black boxes; the answers come to `on_look`."""

    def __init__(self, ranks: Ranks, look: Callable[[tuple[int, ...], bool, bool], None]) -> None:
        self.ranks = ranks
        self.look = look
        self.inquiries: list[_Inquiry] = []

    def ask(self, now: float, ranks: Iterable[int], then: Then, with_boxes: bool = False) -> None:
        """`then` gets the time and what was seen, once all have answered or ANSWER_S have passed.
        Of ranks that do not run, nothing is seen."""
        inquiry = _Inquiry(self._running(ranks), now + SAMPLE_S, then, with_boxes)
        self.inquiries.append(inquiry)
        if inquiry.ranks:
            self.look(inquiry.ranks, False, False)

    def on_look(self, now: float, rank: int, data: bytes) -> None:
        found = read_look(data)
        if found is None:
            return
        for inquiry in list(self.inquiries):
            if inquiry.ask_again_at is not None:
                if rank in inquiry.ranks:
                    inquiry.before[rank] = found
            elif rank in inquiry.pending and found.frames is not None:
                inquiry.now[rank] = found
                inquiry.pending.discard(rank)
                self._end_if_complete(now, inquiry)

    def update(self, now: float) -> None:
        """To be called when a rank has ended."""
        for inquiry in list(self.inquiries):
            if inquiry.ask_again_at is None:
                inquiry.pending &= set(self._running(inquiry.ranks))
                self._end_if_complete(now, inquiry)

    def forget(self) -> None:
        self.inquiries.clear()

    def deadlines(self) -> Iterator[tuple[float, Callable[[float], None]]]:
        """The times at which something is due, and what."""
        for inquiry in self.inquiries:
            if inquiry.ask_again_at is not None:
                yield inquiry.ask_again_at, partial(self._again, inquiry)
            else:
                yield inquiry.until, partial(self._end, inquiry)

    def _running(self, ranks: Iterable[int]) -> tuple[int, ...]:
        return tuple(r for r in ranks if r in self.ranks.started and r not in self.ranks.endings)

    def _again(self, inquiry: _Inquiry, now: float) -> None:
        inquiry.ask_again_at = None
        inquiry.until = now + ANSWER_S
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
