"""The critical path of a step: the chain of work that its length is the sum of. Pure.

It is found backwards, from the end of the step on the rank that ends it last:

- Before this moment, the rank has computed since its last wait for an operation ended.
- That wait ended because an operation did, the last one that ended in it. The operation could not
  begin before the last rank posted it: from then on it is communication that the path goes along.
- Before that, the path is what that rank did, and so on, until the step's beginning.

So each moment of the step is either computation of one rank, or communication of one operation.
Making it shorter makes the step shorter; nothing else does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hvdlite.report.figures import Step
from hvdlite.report.trace import Operation, Span

# Of one step: what a path of more would show is noise.
MOST_SEGMENTS = 10_000


@dataclass(frozen=True)
class Segment:
    """operation: of the communication; empty: this rank computes."""

    rank: int
    operation: str
    begin: float
    end: float

    @property
    def us(self) -> float:
        return self.end - self.begin


class Paths:
    """Finds the critical paths of a timeline's steps."""

    def __init__(self, spans: Iterable[Span], matched: Iterable[dict[int, Operation]]) -> None:
        self._waits: dict[int, list[Span]] = defaultdict(list)
        for span in spans:
            if span.kind == "WAIT":
                self._waits[span.rank].append(span)
        for waits in self._waits.values():
            waits.sort(key=lambda span: span.end)
        self._wait_ends = {
            rank: [span.end for span in waits] for rank, waits in self._waits.items()
        }
        # By rank: when an operation ended there, who posted it last and when, and its label.
        self._ended: dict[int, list[tuple[float, float, int, str]]] = defaultdict(list)
        for of_ranks in matched:
            posted, last = max((each.posted or 0.0, rank) for rank, each in of_ranks.items())
            for rank, each in of_ranks.items():
                self._ended[rank].append((each.done or 0.0, posted, last, each.label))
        for ended in self._ended.values():
            ended.sort()
        self._end_times = {rank: [each[0] for each in ended] for rank, ended in self._ended.items()}

    def of(self, step: Step) -> list[Segment]:
        """From its beginning to its end, without gaps."""
        at, rank = max((span.end, rank) for rank, span in step.of_ranks.items())
        path: list[Segment] = []
        while at > step.begin and len(path) < MOST_SEGMENTS:
            found = self._last_wait(rank, at, step.begin)
            if found is None:
                path.append(Segment(rank, "", step.begin, at))
                break
            wait_end, (_, posted, last, label) = found
            if wait_end < at:
                path.append(Segment(rank, "", wait_end, at))
            # (With two clocks, the last rank may seem to have posted it after its end.)
            begin = max(step.begin, min(posted, wait_end))
            if begin < wait_end:
                path.append(Segment(rank, label, begin, wait_end))
            elif wait_end >= at:
                path.append(Segment(rank, "", step.begin, at))
                break
            at, rank = begin, last
        return path[::-1]

    def _last_wait(
        self, rank: int, at: float, since: float
    ) -> tuple[float, tuple[float, float, int, str]] | None:
        """The last wait that ended until `at` because an operation did, and that operation."""
        waits = self._waits.get(rank, [])
        i = bisect_right(self._wait_ends.get(rank, []), at) - 1
        while i >= 0 and waits[i].end > since:
            wait = waits[i]
            j = bisect_right(self._end_times.get(rank, []), wait.end) - 1
            if j >= 0 and self._end_times[rank][j] > wait.begin:
                return wait.end, self._ended[rank][j]
            i -= 1
        return None


@dataclass
class Share:
    """Of all steps' time, what computation of a rank, or communication of an operation, takes."""

    rank: int | None
    operation: str
    us: float
    steps: int


def shares(paths: Sequence[Sequence[Segment]]) -> list[Share]:
    """The largest first. steps: on the path of how many."""
    total: dict[tuple[int | None, str], float] = defaultdict(float)
    on: dict[tuple[int | None, str], int] = defaultdict(int)
    for path in paths:
        seen = set()
        for segment in path:
            key = (None, segment.operation) if segment.operation else (segment.rank, "")
            total[key] += segment.us
            seen.add(key)
        for key in seen:
            on[key] += 1
    order = sorted(total, key=lambda key: -total[key])
    return [
        Share(rank, operation, total[rank, operation], on[rank, operation])
        for rank, operation in order
    ]
