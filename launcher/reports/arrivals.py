"""Which ranks of a job arrive late, by how much, how steadily, and why. Pure.

All ranks end a step at the same time, as each waits for the others: the later a rank arrives, the
less it waits. In a step in which rank r waits for w[r],

    the least of all w    is what communication took: the last rank waited for nothing else
    w[r] - the least      is what r waited for others
    the next - the least  is by how much the last rank was later than the one before it

Nothing else is compared between ranks, so their clocks need not agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from statistics import fmean, median
from typing import Literal, NamedTuple

from hvdrun.records import Record, Sample

# A wrong name costs somebody a day, and no name only a look at the table. So ranks are named late
# only if there are enough steps, if they come after all others in most of them, also in each half
# of the job, and by so much that it matters. Of two ranks that are last by chance, one would be so
# in 80 % of 20 steps once in a hundred jobs.
FEWEST_STEPS = 20
LATE_SHARE = 0.8
LATE_SHARE_OF_HALF = 2 / 3
LATE_PART_OF_STEP = 0.05
LATE_S = 0.001
# The part of the delay that a cause must explain.
EXPLAINS = 0.5
# A cgroup throttles its ranks if its quota was used up in this part of the periods; this is why
# they are late if it was so in as much less of the others'.
THROTTLED = 0.25

Cause = Literal["data", "throttled", "computing", "unknown"]


class Late(NamedTuple):
    """These come after all others: in this share of the steps, and by this time."""

    ranks: tuple[int, ...]
    share: float
    by_s: float
    cause: Cause
    # Of a step, the late ranks' and the others'.
    data_s: tuple[float, float]
    computing_s: tuple[float, float]


class Last(NamedTuple):
    """In which share of steps a rank was last, by how much then, and how much of each step the
    others have waited for it alone. One that is stopped now and then costs much, and is mostly in
    time."""

    share: float
    by_s: float
    cost_s: float


class Arrivals(NamedTuple):
    """Of ranks that make the steps of one optimizer together."""

    ranks: tuple[int, ...]
    steps: int  # that were compared
    communication_s: float
    last: dict[int, Last]  # by rank
    late: Late | None


def compare(records: Mapping[int, Record]) -> list[Arrivals] | None:
    """One for each optimizer that several ranks have, those with late ranks first. None: the ranks
    are not those of one world, and which of them make steps together is not known."""
    worlds = {record.size for record in records.values()}
    if len(worlds) > 1 or 0 in worlds or len({r.rank for r in records.values()}) < len(records):
        return None
    together: dict[tuple[str, int], dict[int, Record]] = {}
    for rank, record in sorted(records.items()):
        if record.steps > 1:
            together.setdefault((record.optimizer, record.members), {})[rank] = record
    found = [arrivals_of(group) for group in together.values() if len(group) > 1]
    found.sort(key=lambda each: -each.late.by_s if each.late else 0.0)
    return found


def arrivals_of(records: Mapping[int, Record]) -> Arrivals:
    """records: of ranks that make the same steps, at least two."""
    by_step = [{each.step: each for each in record.samples} for record in records.values()]
    # A rank that has joined, or been interrupted, lacks the last ones.
    steps = sorted(set.intersection(*map(set, by_step)))
    ranks = tuple(records)
    if not steps:
        return Arrivals(ranks, 0, 0.0, {}, None)
    samples = {rank: [of[step] for step in steps] for rank, of in zip(ranks, by_step, strict=True)}
    together = zip(*samples.values(), strict=True)
    communication_s = fmean(min(each.waited for each in step) for step in together)
    late = _late(samples, records) if len(steps) >= FEWEST_STEPS else None
    return Arrivals(ranks, len(steps), communication_s, _last(samples), late)


def throttled_part(record: Record) -> float:
    return record.stopped / record.periods if record.periods >= 1 else 0.0


def throttled_cores(record: Record) -> tuple[float, bool]:
    """How many cores a throttled rank got, and whether its DataLoader's workers and all else that
    its cgroup's quota pays for is in it; else it is those of the rank's own process."""
    if record.cores:
        return record.cores, True
    return own_cores(record), False


def own_cores(record: Record) -> float:
    """How many cores the rank's own process used."""
    return record.cpu / record.seconds if record.seconds > 1e-9 else 0.0


def _last(samples: Mapping[int, Sequence[Sample]]) -> dict[int, Last]:
    by_s: dict[int, list[float]] = {rank: [] for rank in samples}
    ranks = tuple(samples)
    for step in zip(*samples.values(), strict=True):
        waited = [each.waited for each in step]
        last = min(range(len(waited)), key=waited.__getitem__)
        by_s[ranks[last]].append(min(waited[:last] + waited[last + 1 :]) - waited[last])
    count = len(samples[ranks[0]])
    return {
        rank: Last(len(each) / count, median(each or [0.0]), sum(each) / count)
        for rank, each in by_s.items()
    }


def _late(samples: Mapping[int, Sequence[Sample]], records: Mapping[int, Record]) -> Late | None:
    """The ranks that are steadily late: up to half of all, so that `the others` means most."""
    order = sorted(samples, key=lambda rank: median(each.waited for each in samples[rank]))
    most = len(order) // 2
    # By number of ranks, those that waited least: by how much they came after all others, by step.
    margins: list[list[float]] = [[] for _ in range(most)]
    for step in zip(*(samples[rank] for rank in order), strict=True):
        waited = [each.waited for each in step]
        late = list(accumulate(waited[:most], max))
        others = list(accumulate(reversed(waited), min))[::-1]
        for index in range(most):
            margins[index].append(others[index + 1] - late[index])
    index = max(range(most), key=lambda each: median(margins[each]))
    margin, ranks = margins[index], tuple(sorted(order[: index + 1]))
    half = len(margin) // 2
    step_s = median(each.seconds for each in samples[order[0]])
    if (
        _share(margin) < LATE_SHARE
        or min(_share(margin[:half]), _share(margin[half:])) < LATE_SHARE_OF_HALF
        or median(margin) < max(LATE_S, LATE_PART_OF_STEP * step_s)
    ):
        return None
    by_s = median(each for each in margin if each > 0)
    theirs = [samples[rank] for rank in ranks]
    others = [each for rank, each in samples.items() if rank not in ranks]
    data_s = _of_a_step(theirs, _data), _of_a_step(others, _data)
    computing_s = _of_a_step(theirs, _computing), _of_a_step(others, _computing)
    cause: Cause = "unknown"
    if _are_throttled(ranks, records):
        cause = "throttled"
    elif data_s[0] - data_s[1] >= EXPLAINS * by_s:
        cause = "data"
    elif computing_s[0] - computing_s[1] >= EXPLAINS * by_s:
        cause = "computing"
    return Late(ranks, _share(margin), by_s, cause, data_s, computing_s)


def _are_throttled(ranks: Sequence[int], records: Mapping[int, Record]) -> bool:
    late = min(throttled_part(records[rank]) for rank in ranks)
    others = median(throttled_part(each) for rank, each in records.items() if rank not in ranks)
    return late >= THROTTLED and late - others >= THROTTLED


def _share(margin: Sequence[float]) -> float:
    return sum(each > 0 for each in margin) / len(margin)


def _of_a_step(samples: Iterable[Sequence[Sample]], part: Callable[[Sample], float]) -> float:
    """In most steps, the mean of these ranks."""
    return median(fmean(map(part, step)) for step in zip(*samples, strict=True))


def _data(sample: Sample) -> float:
    return sample.data


def _computing(sample: Sample) -> float:
    return max(0.0, sample.seconds - sample.waited - sample.data)
