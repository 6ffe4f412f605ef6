"""Figures of a timeline: steps, and ranks that come last. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from hvdlite.report.trace import Operation, Span, Trace


@dataclass
class Step:
    """One step of all ranks: from the latest end of the step before it to its own latest end."""

    number: int
    begin: float
    end: float
    of_ranks: dict[int, Span] = field(repr=False)

    @property
    def us(self) -> float:
        return self.end - self.begin


def steps(spans: Iterable[Span]) -> list[Step]:
    """Of the optimizer with most steps, without its first one, which warms up."""
    by_optimizer: dict[str, dict[int, dict[int, Span]]] = defaultdict(lambda: defaultdict(dict))
    for span in spans:
        if span.kind == "STEP":
            by_optimizer[span.optimizer][span.number][span.rank] = span
    most = max(by_optimizer.values(), key=len, default={})
    made, before = [], math.inf
    for number in sorted(most):
        end = max(span.end for span in most[number].values())
        if end > before:
            made.append(Step(number, before, end, most[number]))
        before = end if before == math.inf else max(before, end)
    return made


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all reach or stay below."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


@dataclass
class LateRank:
    """How often a rank posts an operation after all others, and by how much after the last of
    them, in us; `too_close`: so often the clocks can't tell."""

    rank: int
    operations: int
    last: int
    median_us: float
    total_us: float
    too_close: int


def late_ranks(trace: Trace, matched: Iterable[dict[int, Operation]]) -> list[LateRank]:
    by: dict[int, list[float]] = defaultdict(list)
    took_part: Counter[int] = Counter()
    too_close: Counter[int] = Counter()
    for of_ranks in matched:
        if len(of_ranks) < 2:
            continue
        took_part.update(list(of_ranks))
        order = sorted((each.posted or 0.0, rank) for rank, each in of_ranks.items())
        (before, other), (last, rank) = order[-2:]
        if last - before > trace.error_between(rank, other):
            by[rank].append(last - before)
        else:
            too_close[rank] += 1
    return [
        LateRank(rank, count, len(us := by[rank]), median(us or [0.0]), sum(us), too_close[rank])
        for rank, count in sorted(took_part.items())
    ]
