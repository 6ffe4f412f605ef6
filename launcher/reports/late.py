"""Which ranks of a job arrive late, by how much, how steadily, and why; and what hvdrun says of it.
Pure.

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

from hvdrun.output.folding import spans
from hvdrun.records import FEWEST_STEPS, TELLS_EVERY_S, THROTTLED, Record, Sample, summary_of
from hvdrun.reports import links

# A wrong name costs somebody a day, and no name only a look at the table. So ranks are named late
# only if there are enough steps, if they come after all others in most of them, also in each half
# of the job, and by so much that it matters. Of two ranks that are last by chance, one would be so
# in 80 % of 20 steps once in a hundred jobs.
LATE_SHARE = 0.8
LATE_SHARE_OF_HALF = 2 / 3
LATE_PART_OF_STEP = 0.05
LATE_S = 0.001
# The part of the delay that a cause must explain.
EXPLAINS = 0.5

# Of a larger job, the table has the ranks that are last most often, and a line for all others.
MOST_ROWS = 16
ROWS_OF_MANY = 8
_MOST_HOSTS = 3
# Of so many process sets the late ranks are told in words, those first that are late by most.
_MOST_LATE = 3
# A rank that is not steadily late is named first of all if the others wait for it so much: this
# part of a step, and so many times as much as for any other rank.
_COSTS = 0.2
_COSTS_MORE = 2
_TITLES = (
    *("rank", "host", "steps", "ms per step", "computing", "data", "waiting", "communication"),
    *("last in", "by ms"),
)
NOTHING_TOLD = (
    "no rank has told anything: a job that was started with --summary, or with"
    f" HVDLITE_SUMMARY=1, tells after its first steps, and then every {TELLS_EVERY_S:g} s"
)

HostOf = Callable[[int], str]
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
    """And the others by so much less."""
    late = min(records[rank].throttled for rank in ranks)
    others = median(each.throttled for rank, each in records.items() if rank not in ranks)
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


# ---- in words


# The causes: of one rank, of several; and the figures that show it.
_CAUSES = {
    "data": ("its DataLoader", "their DataLoaders", "{data} of a step, the others' {others_data}"),
    "throttled": ("its cgroup throttles it", "their cgroups throttle them", "{quota}"),
    "computing": (
        *("it computes longer", "they compute longer"),
        "{computing} of a step, the others {others_computing}; on {cores:.2f} of a core",
    ),
    "unknown": (
        *("the cause is not seen", "the cause is not seen"),
        "computing takes {computing} of a step, the others {others_computing}",
    ),
}
# Of a step in milliseconds, but for the steps and the share of them. None: not known.
_Row = tuple[float | None, ...]


def with_steps(records: Mapping[int, Record]) -> dict[int, Record]:
    """Those that have times of steps."""
    return {rank: record for rank, record in sorted(records.items()) if record.steps > 1}


def so_far(
    records: Mapping[int, Record], num_proc: int, host_of: HostOf, silent_s: float | None = None
) -> str:
    """The answer to somebody who asks while the job runs. silent_s: for how long no rank has told
    of a step; None: not for longer than usual."""
    if not records:
        return NOTHING_TOLD
    texts, before = [], ""
    if silent_s is not None:
        texts, before = (
            [f"no rank has told of a step for {silent_s:.0f} s; before that:"],
            " before that",
        )
    texts += [summary_of(records, num_proc), *report(records, host_of, "")]
    recent = with_steps({rank: each.recent for rank, each in records.items() if each.recent})
    if recent:
        seconds = max(record.seconds for record in recent.values())
        begin, *rest = report(recent, host_of, "", is_recent=True)
        texts += [f"the last {seconds:.0f} s{before}: {begin}", *rest]
    return "\n".join(texts)


def report(
    records: Mapping[int, Record],
    host_of: HostOf,
    head: str = "hvdrun: ",
    is_recent: bool = False,
) -> list[str]:
    """The table, and the verdict in words. Nothing without steps. is_recent: of a record's steps,
    the first one is only there to begin with."""
    timed = with_steps(records)
    if not timed:
        return []
    found = compare(timed)
    begin, *rows = _table(timed, found or [], host_of, is_recent)
    return [head + begin, *rows, *(head + each for each in verdicts(timed, found, host_of))]


def verdicts(
    records: Mapping[int, Record], found: list[Arrivals] | None, host_of: HostOf
) -> list[str]:
    """In words. records: with steps; found: what `compare` finds in them."""
    texts = []
    if found is None:
        texts.append(
            "which rank is late is not known: the ranks are not those of one world, so their steps"
            " can't be compared"
        )
    # Several process sets may each have late ranks.
    late = [each for each in found or [] if each.late][:_MOST_LATE]
    for each in late or ([max(found, key=_costs_most)] if found else []):
        texts.append(_verdict(each, records, host_of))
    told = {
        rank
        for each in late
        if each.late and each.late.cause == "throttled"
        for rank in each.late.ranks
    }
    throttled = {
        rank: each
        for rank, each in records.items()
        if rank not in told and each.throttled >= THROTTLED
    }
    if throttled:
        are = "are" if len(throttled) > 1 else "is"
        texts.append(f"{_who(tuple(throttled), host_of)} {are} throttled: {_quota(throttled)}")
    return texts + links.verdicts(records, found, host_of)


def _verdict(found: Arrivals, records: Mapping[int, Record], host_of: HostOf) -> str:
    if found.steps < FEWEST_STEPS:
        return (
            f"which rank is late is not known: {found.steps} step{'s' * (found.steps != 1)} that"
            f" all ranks made can be compared, and {FEWEST_STEPS} are needed"
        )
    if found.late is None:
        *_, others, (rank, last) = sorted(found.last.items(), key=lambda item: item[1].cost_s)
        theirs = [records[each] for each in found.ranks]
        part = last.cost_s / max(median(r.seconds / (r.steps - 1) for r in theirs), 1e-9)
        if part >= _COSTS and last.cost_s >= max(LATE_S, _COSTS_MORE * others[1].cost_s):
            share = f"{100 * last.share:.0f} % of them"
            return (
                f"{_who((rank,), host_of)} costs the others {_ms(last.cost_s)} of each step"
                f" ({100 * part:.0f} %)"
                + (f", though it is last in only {share}" if last.share < LATE_SHARE else "")
            )
        return (
            f"no rank is steadily late: the others wait most for {_who((rank,), host_of)},"
            f" {_ms(last.cost_s)} of a step; it arrives last in {100 * last.share:.0f} % of steps"
        )
    late = found.late
    return (
        f"{_who(late.ranks, host_of)} {'arrive' if len(late.ranks) > 1 else 'arrives'} last in"
        f" {100 * late.share:.0f} % of steps, by {_ms(late.by_s)}: {_cause(late, records)}"
    )


def _cause(late: Late, records: Mapping[int, Record]) -> str:
    theirs = {rank: records[rank] for rank in late.ranks}
    one, several, why = _CAUSES[late.cause]
    figures = why.format(
        data=_ms(late.data_s[0]),
        others_data=_ms(late.data_s[1]),
        computing=_ms(late.computing_s[0]),
        others_computing=_ms(late.computing_s[1]),
        quota=_quota(theirs),
        cores=median(map(own_cores, theirs.values())),
    )
    return f"{several if len(theirs) > 1 else one} ({figures})"


def _costs_most(found: Arrivals) -> tuple[bool, float]:
    costs_s = max((each.cost_s for each in found.last.values()), default=0.0)
    return found.steps >= FEWEST_STEPS, costs_s


def _quota(throttled: Mapping[int, Record]) -> str:
    """How often it was used up, how many cores these ranks got, and who used them."""
    records = throttled.values()
    cores, are_of_cgroups = zip(*map(throttled_cores, records), strict=True)
    who = "the cgroup"
    if not all(are_of_cgroups):  # not one number of each kind
        who, cores = "the rank's own process", tuple(map(own_cores, records))
    parts = _from_to([100 * each.throttled for each in records], ".0f")
    return (
        f"the CPU quota was used up in {parts} % of its periods, {who} used"
        f" {_from_to(cores, '.2f')} cores"
    )


def _who(ranks: Sequence[int], host_of: HostOf) -> str:
    hosts = list(dict.fromkeys(map(host_of, ranks)))
    names = ", ".join(hosts[:_MOST_HOSTS])
    if len(hosts) > _MOST_HOSTS:
        names += f" and {len(hosts) - _MOST_HOSTS} more hosts"
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {spans(ranks)} on {names}"


def _table(
    records: Mapping[int, Record], found: list[Arrivals], host_of: HostOf, is_recent: bool
) -> list[str]:
    arrivals = {rank: each for each in found if each.steps for rank in each.ranks}
    rows = {rank: _row(record, rank, arrivals.get(rank)) for rank, record in records.items()}
    if is_recent:
        rows = {rank: (records[rank].steps - 1, *row[1:]) for rank, row in rows.items()}
    shown = list(rows)
    if len(shown) > MOST_ROWS:
        shown = sorted(shown, key=lambda rank: -(rows[rank][-2] or 0.0))[:ROWS_OF_MANY]
        shown.sort()
    lines: list[tuple[str, ...]] = [_TITLES]
    lines += [(str(rank), host_of(rank), *_cells(rows[rank])) for rank in shown]
    if rest := [row for rank, row in rows.items() if rank not in shown]:
        lines.append(("others", f"({len(rest)} ranks)", *_cells(_middle(rest))))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = ["where the time of a step goes, in ms:"]
    for line in lines:
        cells = [
            cell.ljust(width) if index == 1 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        texts.append(f"    {'  '.join(cells)}".rstrip())
    return texts


def _row(record: Record, rank: int, arrivals: Arrivals | None) -> _Row:
    per_step = 1000 / (record.steps - 1)
    step, data, waited = (
        per_step * seconds for seconds in (record.seconds, record.data, record.waited)
    )
    communication, share, by = None, None, None
    if arrivals is not None:
        communication = min(waited, 1000 * arrivals.communication_s)
        if arrivals.steps >= FEWEST_STEPS:
            share, by = arrivals.last[rank].share, 1000 * arrivals.last[rank].by_s
    waiting = waited - (communication or 0.0)
    computing = max(0.0, step - data - waited)
    return (record.steps, step, computing, data, waiting, communication, share, by)


def _middle(rows: Iterable[_Row]) -> _Row:
    columns = ([each for each in column if each is not None] for column in zip(*rows, strict=True))
    return tuple(median(column) if column else None for column in columns)


def _cells(row: _Row) -> tuple[str, ...]:
    steps, *times, share, by = row
    texts = ["-" if ms is None else f"{ms:.1f}" for ms in (*times, by if share else None)]
    return (
        f"{steps:.0f}",
        *texts[:-1],
        "-" if share is None else f"{100 * share:.0f} %",
        texts[-1],
    )


def _ms(seconds: float) -> str:
    ms = 1000 * seconds
    return f"{ms:.{0 if ms >= 10 else 1}f} ms"


def _from_to(numbers: Sequence[float], form: str) -> str:
    texts = [f"{number:{form}}" for number in (min(numbers), max(numbers))]
    return texts[0] if texts[0] == texts[1] else " to ".join(texts)
