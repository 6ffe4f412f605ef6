"""Signals that hvdrun passes on to the ranks, and their answers. No clock."""

from __future__ import annotations

import signal
from collections.abc import Iterable

from hvdrun.output.folding import spans

# After this time hvdrun reports what it knows.
ANSWERS_S = 2.0


class _Request:
    def __init__(self, number: int, ranks: Iterable[int], until: float) -> None:
        self.number = number
        self.until = until
        self.waiting = set(ranks)
        self.asked = len(self.waiting)
        self.sent: set[int] = set()
        self.deadly: set[int] = set()  # have no handler, so the signal was not sent

    def report(self) -> str | None:
        """None: all ranks got it."""
        name = signal.Signals(self.number).name
        if not (self.deadly or self.waiting):
            return None
        if self.asked == 1 and self.deadly:
            return (
                f"hvdrun: {name} was not sent to the rank: it has no handler for it, which would"
                " have ended it"
            )
        total = "1 rank" if self.asked == 1 else f"{self.asked} ranks"
        parts = [f"hvdrun: {name} was sent to {len(self.sent)} of {total}"]
        if self.deadly:
            have, them = ("has", "it") if len(self.deadly) == 1 else ("have", "them")
            parts.append(
                f"{_named(self.deadly)} {have} no handler for it, which would have ended {them}"
            )
        if self.waiting:
            have = "has" if len(self.waiting) == 1 else "have"
            parts.append(f"{_named(self.waiting)} {have} not answered within {ANSWERS_S:g} s")
        return "; ".join(parts)


class PassingOn:
    """Each signal is a request to the keepers of the ranks that run; they answer."""

    def __init__(self) -> None:
        self.last = 0
        self.requests: dict[int, _Request] = {}

    def ask(self, now: float, number: int, ranks: Iterable[int]) -> int:
        """The number of the request."""
        self.last += 1
        self.requests[self.last] = _Request(number, ranks, now + ANSWERS_S)
        return self.last

    def answered(self, rank: int, request: int, answer: str) -> None:
        known = self.requests.get(request)
        if known is None or rank not in known.waiting:
            return
        known.waiting.discard(rank)
        if answer == "sent":
            known.sent.add(rank)
        elif answer == "deadly":
            known.deadly.add(rank)

    def gone(self, rank: int) -> None:
        """The rank has ended, and can't answer any more."""
        for request in self.requests.values():
            request.waiting.discard(rank)

    def due_at(self) -> float | None:
        return min((request.until for request in self.requests.values()), default=None)

    def reports(self, now: float) -> list[str]:
        """Removes the requests that all ranks have answered, or that wait no longer; what to say
        about them."""
        over = [n for n, r in self.requests.items() if not r.waiting or now >= r.until]
        return [text for n in over if (text := self.requests.pop(n).report())]


def not_passed_on(number: int) -> str:
    return f"hvdrun: {signal.Signals(number).name} was not passed on: no rank is running"


def _named(ranks: Iterable[int]) -> str:
    """'rank 3', 'ranks 1 and 3', 'ranks 0-3,5 and 7'."""
    numbers = sorted(ranks)
    head, _, last = spans(numbers).rpartition(",")
    return f"rank{'s' if len(numbers) > 1 else ''} {f'{head} and {last}' if head else last}"
