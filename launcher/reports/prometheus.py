"""What ranks have measured, in Prometheus' text format: `hvdrun --metrics-file FILE`. Pure.

All values are counters of the whole job, from which Prometheus computes rates itself, and who is
late, which it can't compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from hvdrun.records import Record
from hvdrun.reports import links
from hvdrun.reports.figures import computing_s
from hvdrun.reports.late import HostOf, compare, with_steps

Labels = Mapping[str, object]


class _Counter(NamedTuple):
    name: str
    help: str
    read: Callable[[Record], float]


_STEPS = _Counter("steps", "steps of the rank's DistributedOptimizer", lambda each: each.steps)
_COUNTERS = (
    _Counter("step_seconds", "time of the steps, without the first", lambda each: each.seconds),
    _Counter("computing_seconds", "the part that is neither data nor waited", computing_s),
    _Counter("data_seconds", "the part spent waiting for a DataLoader", lambda each: each.data),
    _Counter("waited_seconds", "the part spent waiting for hvdlite", lambda each: each.waited),
    _Counter("cpu_seconds", "CPU time of the process in it", lambda each: each.cpu),
    _Counter("cpu_periods", "periods of the cgroup's CPU quota", lambda each: each.periods),
    _Counter("cpu_throttled_periods", "those in which it was used up", lambda each: each.stopped),
)


def text_of(
    records: Mapping[int, Record],
    host_of: HostOf,
    labels: Labels,
    size: int,
    is_running: bool,
    silent_s: float | None = None,
) -> str:
    """The file. labels: of every value; size: how many ranks the job has; silent_s: as for
    `late.so_far`: then what was true in the last minute before is not told as if it were
    now."""
    ranks = {rank: {**labels, "rank": rank, "host": host_of(rank)} for rank in sorted(records)}
    timed = with_steps(records)
    lines = [
        *_family("hvdlite_ranks", "gauge", "ranks of the job", [(labels, size)]),
        *_family("hvdlite_running", "gauge", "1 while the job runs", [(labels, int(is_running))]),
    ]
    for counter, known in ((_STEPS, records), *((each, timed) for each in _COUNTERS)):
        values = [(ranks[rank], counter.read(known[rank])) for rank in ranks if rank in known]
        lines += _family(f"hvdlite_{counter.name}_total", "counter", counter.help, values)
    silent = [(labels, silent_s or 0.0)] if is_running else []
    words = "for which no rank has told of a step, if that is longer than usual"
    lines += _family("hvdlite_silent_seconds", "gauge", words, silent)
    lines += _links(timed, host_of, labels)
    if silent_s is None:
        lines += _recent(timed, ranks, host_of, labels)
    return "".join(f"{line}\n" for line in lines)


def _recent(
    timed: Mapping[int, Record], ranks: Mapping[int, Labels], host_of: HostOf, labels: Labels
) -> list[str]:
    """In the last minute, of a job that has run for longer."""
    latest = {rank: record.recent or record for rank, record in timed.items()}
    last: list[tuple[Labels, float]] = []
    late: list[tuple[Labels, float]] = []
    for found in (compare(latest) or []) if latest else []:
        last += [(ranks[rank], each.share) for rank, each in found.last.items()]
        if found.late:
            cause = {"cause": found.late.cause}
            late += [({**ranks[rank], **cause}, found.late.by_s) for rank in found.late.ranks]
    rates = [
        ({**labels, "from": pair.sender, "to": pair.receiver}, rate)
        for pair in links.pairs_of(latest, host_of)
        if (rate := pair.gbit_per_s) is not None
    ]
    return [
        *_family("hvdlite_last_ratio", "gauge", "part of steps in which the rank is last", last),
        *_family("hvdlite_late_seconds", "gauge", "by which it is steadily late, if it is", late),
        *_family("hvdlite_link_gbit_per_second", "gauge", "rate while under way", rates),
    ]


def _links(timed: Mapping[int, Record], host_of: HostOf, labels: Labels) -> list[str]:
    pairs = [
        ({**labels, "from": pair.sender, "to": pair.receiver}, pair)
        for pair in links.pairs_of(timed, host_of)
    ]
    sent = [(each, pair.bytes) for each, pair in pairs]
    tcp = [(each, pair.tcp_bytes) for each, pair in pairs]
    busy = [(each, pair.busy_s) for each, pair in pairs]
    return [
        *_family("hvdlite_sent_bytes_total", "counter", "bytes of collectives' messages", sent),
        *_family("hvdlite_tcp_bytes_total", "counter", "bytes over TCP, from host to host", tcp),
        *_family("hvdlite_tcp_busy_seconds_total", "counter", "time these were under way", busy),
    ]


def _family(name: str, kind: str, words: str, values: Iterable[tuple[Labels, float]]) -> list[str]:
    lines = [_line(name, labels, value) for labels, value in values]
    return [f"# HELP {name} {words}", f"# TYPE {name} {kind}", *lines] if lines else []


def _line(name: str, labels: Labels, value: float) -> str:
    pairs = ",".join(f'{label}="{_escaped(str(text))}"' for label, text in labels.items())
    return f"{name}{{{pairs}}} {value!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
