"""Figures of a timeline: steps, overlap, bandwidth, ranks that come last. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from hvdlite.report.trace import Operation, Span, Trace

Interval = tuple[float, float]


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
    if not by_optimizer:
        return []
    most = max(by_optimizer.values(), key=len)
    made, before = [], None
    for number in sorted(most):
        end = max(span.end for span in most[number].values())
        if before is not None and end > before:
            made.append(Step(number, before, end, most[number]))
        before = end if before is None else max(before, end)
    return made


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all reach or stay below."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Sorted, without overlaps."""
    made: list[Interval] = []
    for begin, end in sorted(intervals):
        if made and begin <= made[-1][1]:
            made[-1] = made[-1][0], max(end, made[-1][1])
        elif end > begin:
            made.append((begin, end))
    return made


def common(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """How long both last at the same time; each sorted and without overlaps."""
    i = j = 0
    total = 0.0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        total += max(0.0, end - begin)
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return total


@dataclass
class Overlap:
    """Of one rank, in all its steps, in us. communication: the time in which at least one operation
    has been posted by all ranks and has not ended; hidden: the part of it during a backward pass;
    waited: the time in which the program waited for hvdlite, also for late ranks."""

    rank: int
    communication: float
    hidden: float
    waited: float
    steps: int

    @property
    def share(self) -> float | None:
        return self.hidden / self.communication if self.communication else None


def last_posted(of_ranks: dict[int, Operation]) -> float:
    """Only then all data can move: a host's ranks may begin before other hosts have come."""
    return max(each.posted or 0.0 for each in of_ranks.values())


def moving(of_ranks: dict[int, Operation]) -> dict[int, Interval]:
    """When it was under way on each rank, since all ranks have posted it."""
    posted = last_posted(of_ranks)
    return {
        rank: (max(posted, each.matched or posted), each.done or posted)
        for rank, each in of_ranks.items()
    }


def overlaps(
    trace: Trace, of_steps: Sequence[Step], matched: Iterable[dict[int, Operation]]
) -> list[Overlap]:
    made = []
    under_way: dict[int, list[Interval]] = defaultdict(list)
    for of_ranks in matched:
        for rank, interval in moving(of_ranks).items():
            under_way[rank].append(interval)
    spans: dict[int, list[Span]] = defaultdict(list)
    for span in trace.spans:
        spans[span.rank].append(span)
    for rank in sorted(trace.ranks):
        inside = union(
            (step.of_ranks[rank].begin, step.of_ranks[rank].end)
            for step in of_steps
            if rank in step.of_ranks
        )
        if not inside:
            continue
        mine = spans[rank]
        backward = union((span.begin, span.end) for span in mine if span.kind == "BACKWARD")
        waits = union((span.begin, span.end) for span in mine if span.kind == "WAIT")
        moves = _cut(union(under_way[rank]), inside)
        count = sum(rank in step.of_ranks for step in of_steps)
        total = sum(end - begin for begin, end in moves)
        waited = common(waits, inside)
        made.append(Overlap(rank, total, common(moves, backward), waited, count))
    return made


def _cut(intervals: Sequence[Interval], to: Sequence[Interval]) -> list[Interval]:
    """The parts of the intervals that lie in the others."""
    made, first = [], 0
    for begin, end in intervals:
        while first < len(to) and to[first][1] <= begin:
            first += 1
        i = first
        while i < len(to) and to[i][0] < end:
            made.append((max(begin, to[i][0]), min(end, to[i][1])))
            i += 1
    return made


@dataclass
class Bandwidth:
    """Operations of a kind whose bytes are more than `above` and at most `up_to`. us: the median of
    the time in which they move; rate: that of bytes / this time, in MB/s; bus_rate: for allreduce
    2(n-1)/n times that, what each link of a ring of n ranks carries; None for other kinds."""

    kind: str
    above: int
    up_to: int
    count: int
    us: float
    rate: float
    bus_rate: float | None


def bandwidths(matched: Iterable[dict[int, Operation]]) -> list[Bandwidth]:
    found: dict[tuple[str, int], list[tuple[float, float, float]]] = defaultdict(list)
    for of_ranks in matched:
        n, posted = len(of_ranks), last_posted(of_ranks)
        for each in of_ranks.values():
            us = (each.done or posted) - max(posted, each.running or posted)
            if us > 0 and each.size_bytes:
                rate = each.size_bytes / us  # bytes per us are MB per s
                bus = 2 * (n - 1) / n * rate
                found[each.kind, _class_of(each.size_bytes)].append((us, rate, bus))
    return [
        Bandwidth(
            kind,
            0 if top <= 1024 else top // 4,
            top,
            len(seen),
            median(us for us, _, _ in seen),
            median(rate for _, rate, _ in seen),
            median(bus for _, _, bus in seen) if kind == "allreduce" else None,
        )
        for (kind, top), seen in sorted(found.items())
    ]


def _class_of(size_bytes: int) -> int:
    """The smallest of 1 KiB, 4 KiB, 16 KiB … that holds it."""
    top = 1024
    while top < size_bytes:
        top *= 4
    return top


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
        LateRank(
            rank,
            took_part[rank],
            len(by[rank]),
            median(by[rank]) if by[rank] else 0.0,
            sum(by[rank]),
            too_close[rank],
        )
        for rank in sorted(took_part)
    ]
