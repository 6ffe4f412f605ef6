"""What hvdrun says at the end of a job about where its ranks' time went, and which of them, or
which link between their hosts, is slow. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from hvdrun.output.folding import spans
from hvdrun.records import TELLS_EVERY_S, Record
from hvdrun.reports import links
from hvdrun.reports.arrivals import (
    FEWEST_STEPS,
    LATE_S,
    LATE_SHARE,
    THROTTLED,
    Arrivals,
    Last,
    Late,
    compare,
    own_cores,
    throttled_cores,
    throttled_part,
)
from hvdrun.summary import summary_of

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

HostOf = Callable[[int], str]
NOTHING_TOLD = (
    "no rank has told anything: a job that was started with --summary, or with"
    f" HVDLITE_SUMMARY=1, tells after its first steps, and then every {TELLS_EVERY_S:g} s"
)


class _Row(NamedTuple):
    """Milliseconds of a step, but for the steps and the share of them. None: not known."""

    steps: float
    step: float
    computing: float
    data: float
    waiting: float | None
    communication: float | None
    last_in: float | None
    by: float | None


def so_far(
    records: Mapping[int, Record], num_proc: int, host_of: HostOf, silent_s: float | None = None
) -> str:
    """The answer to somebody who asks while the job runs. silent_s: for how long no rank has told
    of a step; None: not for longer than usual."""
    if not records:
        return NOTHING_TOLD
    texts = (
        []
        if silent_s is None
        else [f"no rank has told of a step for {silent_s:.0f} s; before that:"]
    )
    texts += [summary_of(records, num_proc), *report(records, host_of, "")]
    recent = {rank: record.recent for rank, record in records.items() if record.recent}
    if timed := with_steps(recent):
        seconds = max(record.seconds for record in timed.values())
        found = compare(timed)
        begin, *rows = _table(timed, found or [], host_of, is_recent=True)
        before = "" if silent_s is None else " before that"
        texts += [
            f"the last {seconds:.0f} s{before}: {begin}",
            *rows,
            *verdicts(timed, found, host_of),
        ]
    return "\n".join(texts)


def report(records: Mapping[int, Record], host_of: HostOf, head: str = "hvdrun: ") -> list[str]:
    """The table, and the verdict in words. Nothing without steps."""
    timed = with_steps(records)
    if not timed:
        return []
    found = compare(timed)
    texts = _table(timed, found or [], host_of)
    texts[0] = f"{head}{texts[0]}"
    return texts + [f"{head}{verdict}" for verdict in verdicts(timed, found, host_of)]


def with_steps(records: Mapping[int, Record]) -> dict[int, Record]:
    """Those that have times of steps."""
    return {rank: record for rank, record in sorted(records.items()) if record.steps > 1}


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
    for each in late or sorted(found or [], key=_costs_least)[:1]:
        texts.append(_verdict(each, records, host_of))
    told = [
        rank
        for each in late
        if each.late and each.late.cause == "throttled"
        for rank in each.late.ranks
    ]
    parts = {rank: throttled_part(record) for rank, record in records.items() if rank not in told}
    if throttled := {rank: part for rank, part in parts.items() if part >= THROTTLED}:
        used = _used([records[rank] for rank in throttled])
        used_up = _from_to([100 * part for part in throttled.values()], ".0f", " %")
        gave = (
            f"are throttled: {used}, and the cgroups' CPU quotas were used up in {used_up} of their"
            if len(throttled) > 1
            else f"is throttled: {used}, and the cgroup's CPU quota was used up in {used_up} of its"
        )
        texts.append(f"{_who(tuple(throttled), host_of)} {gave} periods")
    return texts + links.verdicts(records, found, host_of)


def _verdict(found: Arrivals, records: Mapping[int, Record], host_of: HostOf) -> str:
    if found.steps < FEWEST_STEPS:
        return (
            f"which rank is late is not known: {found.steps} step{'s' * (found.steps != 1)} that"
            f" all ranks made can be compared, and {FEWEST_STEPS} are needed"
        )
    if found.late is None:
        *_, others, (rank, last) = sorted(found.last.items(), key=_cost)
        part = last.cost_s / median(map(_step_s, (records[each] for each in found.ranks)))
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
    many = len(late.ranks) > 1
    theirs = [records[rank] for rank in late.ranks]
    cores = median(map(own_cores, theirs))
    computing = f"{_ms(late.computing_s[0])} of a step, the others {_ms(late.computing_s[1])}"
    match late.cause:
        case "data":
            return (
                f"{'their DataLoaders' if many else 'its DataLoader'} ({_ms(late.data_s[0])} of a"
                f" step, the others' {_ms(late.data_s[1])})"
            )
        case "throttled":
            part = median(map(throttled_part, theirs))
            return (
                f"{'their cgroups throttle them' if many else 'its cgroup throttles it'}"
                f" (the CPU quota was used up in {100 * part:.0f} % of its periods;"
                f" {_used(theirs)})"
            )
        case "computing":
            return (
                f"{'they compute' if many else 'it computes'} longer ({computing}; on"
                f" {cores:.2f} of a core{' each' if many else ''})"
            )
        case _:
            return (
                f"the cause is not seen ({'they compute' if many else 'it computes'} {computing})"
            )


def _costs_least(found: Arrivals) -> tuple[bool, float]:
    costs_s = max((each.cost_s for each in found.last.values()), default=0.0)
    return found.steps < FEWEST_STEPS, -costs_s


def _step_s(record: Record) -> float:
    return max(record.seconds / (record.steps - 1), 1e-9)


def _cost(item: tuple[int, Last]) -> float:
    return item[1].cost_s


def _used(throttled: Sequence[Record]) -> str:
    """How many cores they got, and who used them."""
    found = [throttled_cores(record) for record in throttled]
    if all(is_of_cgroup for _, is_of_cgroup in found):
        who, cores = ("its cgroup", "the cgroup of each"), [number for number, _ in found]
    else:
        who, cores = ("its own process", "the own process of each"), list(map(own_cores, throttled))
    return f"{who[len(throttled) > 1]} used {_from_to(cores, '.2f')} cores"


def _who(ranks: Sequence[int], host_of: HostOf) -> str:
    hosts = list(dict.fromkeys(map(host_of, ranks)))
    names = ", ".join(hosts[:_MOST_HOSTS])
    if len(hosts) > _MOST_HOSTS:
        names += f" and {len(hosts) - _MOST_HOSTS} more hosts"
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {spans(ranks)} on {names}"


def _table(
    records: Mapping[int, Record], found: list[Arrivals], host_of: HostOf, is_recent: bool = False
) -> list[str]:
    arrivals = {rank: each for each in found if each.steps for rank in each.ranks}
    rows = {rank: _row(record, rank, arrivals.get(rank)) for rank, record in records.items()}
    if is_recent:
        rows = {rank: row._replace(steps=row.steps - 1) for rank, row in rows.items()}
    shown = list(rows)
    if len(shown) > MOST_ROWS:
        shown = sorted(shown, key=lambda rank: -(rows[rank].last_in or 0.0))[:ROWS_OF_MANY]
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
    computing = max(0.0, step - data - waited)
    if arrivals is None:
        return _Row(record.steps, step, computing, data, waited, None, None, None)
    communication = min(waited, 1000 * arrivals.communication_s)
    waiting = waited - communication
    if arrivals.steps < FEWEST_STEPS:
        return _Row(record.steps, step, computing, data, waiting, communication, None, None)
    share, by_s, _ = arrivals.last[rank]
    return _Row(record.steps, step, computing, data, waiting, communication, share, 1000 * by_s)


def _middle(rows: Iterable[_Row]) -> _Row:
    columns = ([each for each in column if each is not None] for column in zip(*rows, strict=True))
    return _Row(*(median(column) if column else None for column in columns))  # type: ignore[arg-type]


def _cells(row: _Row) -> tuple[str, ...]:
    steps, *times, last_in, by = row
    share = "-" if last_in is None else f"{100 * last_in:.0f} %"
    return (f"{steps:.0f}", *map(_cell, times), share, _cell(by) if last_in else "-")


def _cell(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.1f}"


def _ms(seconds: float) -> str:
    ms = 1000 * seconds
    return f"{ms:.{0 if ms >= 10 else 1}f} ms"


def _from_to(numbers: Sequence[float], form: str, unit: str = "") -> str:
    texts = [f"{number:{form}}{unit}" for number in (min(numbers), max(numbers))]
    return texts[0] if texts[0] == texts[1] else " to ".join(texts)
