"""What ranks have measured, as figures that programs read: `hvdrun --metrics PID --json`. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hvdrun.records import THROTTLED, Record
from hvdrun.reports import links
from hvdrun.reports.late import (
    NOTHING_TOLD,
    Arrivals,
    HostOf,
    compare,
    throttled_cores,
    verdicts,
    with_steps,
)

# Grows if a field changes its meaning or is removed, not if one is added.
VERSION = 1
_SUMMED = ("seconds", "computing", "data", "waited", "cpu")


def as_json(
    records: Mapping[int, Record], num_proc: int, host_of: HostOf, silent_s: float | None = None
) -> str:
    """One document, in one line. docs/reference/metrics.md describes it. silent_s: as for
    `late.so_far`."""
    recent = {rank: record.recent for rank, record in records.items() if record.recent}
    document = {
        "version": VERSION,
        "size": num_proc,
        "silent": silent_s,
        "whole": _part(records, host_of),
        "recent": _part(recent, host_of, steps_before=1) if with_steps(recent) else None,
    }
    return json.dumps(document)


def computing_s(record: Record) -> float:
    return max(0.0, record.seconds - record.data - record.waited)


def _part(records: Mapping[int, Record], host_of: HostOf, steps_before: int = 0) -> dict[str, Any]:
    """steps_before: how many of a record's steps are only there to begin with."""
    timed = with_steps(records)
    found = compare(timed) if timed else []
    arrivals = {rank: each for each in found or [] if each.steps for rank in each.ranks}
    rows = [
        _row(rank, record, host_of, arrivals.get(rank), steps_before)
        for rank, record in sorted(records.items())
    ]
    total = {name: sum(row[name] for row in rows) for name in _SUMMED}
    whole_s = total["seconds"]
    pairs = links.pairs_of(timed, host_of)
    slow = links.takes_time(timed, found) and links.slow_link(
        pairs, links.throttled_hosts(timed, host_of)
    )
    return {
        "steps": max((row["steps"] for row in rows), default=0),
        "ranks": rows,
        "sum": total,
        "shares": {name: _ratio(total[name], whole_s) for name in ("computing", "data", "waited")},
        "late": [_late(each, host_of) for each in found or [] if each.late],
        "throttled": [
            {"rank": rank, "host": host_of(rank), "periods": part} | _cores(record)
            for rank, record in timed.items()
            if (part := record.throttled) >= THROTTLED
        ],
        "links": [_link(pair) for pair in pairs],
        "slow_link": slow._asdict() if slow else None,
        "verdicts": verdicts(timed, found, host_of) if timed else [NOTHING_TOLD],
    }


def _row(
    rank: int, record: Record, host_of: HostOf, arrivals: Arrivals | None, steps_before: int
) -> dict[str, Any]:
    last = arrivals.last[rank] if arrivals else None
    return {
        "rank": rank,
        "host": host_of(rank),
        "steps": int(record.steps) - steps_before,
        "seconds": record.seconds,
        "computing": computing_s(record),
        "data": record.data,
        "waited": record.waited,
        "cpu": record.cpu,
        "throttled": record.throttled,
        "communication_of_a_step": arrivals.communication_s if arrivals else None,
        "last_in": last.share if last else None,
        "last_by": last.by_s if last else None,
        "last_costs": last.cost_s if last else None,
    }


def _link(pair: links.Pair) -> dict[str, Any]:
    return {
        "from": pair.sender,
        "to": pair.receiver,
        "bytes": int(pair.bytes),
        "tcp_bytes": int(pair.tcp_bytes),
        "busy": pair.busy_s,
        "gbit_per_s": pair.gbit_per_s,
    }


def _late(found: Arrivals, host_of: HostOf) -> dict[str, Any]:
    late = found.late
    assert late is not None
    return {
        "ranks": list(late.ranks),
        "hosts": list(dict.fromkeys(map(host_of, late.ranks))),
        "last_in": late.share,
        "last_by": late.by_s,
        "cause": late.cause,
        "data": dict(zip(("late", "others"), late.data_s, strict=True)),
        "computing": dict(zip(("late", "others"), late.computing_s, strict=True)),
    }


def _cores(record: Record) -> dict[str, Any]:
    cores, is_of_cgroup = throttled_cores(record)
    return {"cores": cores, "cores_of": "cgroup" if is_of_cgroup else "process"}


def _ratio(part: float, whole: float) -> float:
    """A finite number, whatever a rank has sent: JSON has no other."""
    return part / whole if whole > 1e-9 else 0.0
