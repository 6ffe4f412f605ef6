"""Timelines made by hand, of which the figures are known. Times are in us."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hvdlite.report.trace import Operation, Span, Trace


def operation(
    rank: int, name: str, times: tuple[float, float, float, float], size_bytes: int = 1000
) -> Operation:
    """times: POSTED, MATCHED, RUNNING, DONE."""
    return Operation(rank, 0, "allreduce", name, size_bytes, *times)


def span(rank: int, kind: str, begin: float, end: float, number: int = 0) -> Span:
    optimizer = "" if kind == "WAIT" else "optimizer"
    return Span(rank, kind, kind, optimizer, number, begin, end)


def trace(operations: list[Operation], spans: list[Span], ranks: int = 2) -> Trace:
    return Trace({rank: f"rank {rank} on host" for rank in range(ranks)}, operations, spans)


def two_ranks() -> Trace:
    """Two steps of 1000 us. In the second one, rank 0 computes until 1400, and posts `a` at 1200
    and `b` at 1400; rank 1 posts `a` at 1300 and `b` at 1700, the end of its backward. `a` moves
    from 1300 to 1500, `b` from 1700 to 1900; then rank 1 updates until 2000, rank 0
    until 1950."""
    spans = [
        span(0, "STEP", 0, 1000, 1),
        span(1, "STEP", 0, 1000, 1),
        span(0, "STEP", 1000, 1950, 2),
        span(1, "STEP", 1000, 2000, 2),
        span(0, "BACKWARD", 1100, 1400, 2),
        span(1, "BACKWARD", 1100, 1700, 2),
        span(0, "WAIT", 1400, 1900),
        span(1, "WAIT", 1700, 1900),
    ]
    operations = [
        operation(0, "a", (1200, 1300, 1300, 1500)),
        operation(1, "a", (1300, 1300, 1300, 1500)),
        operation(0, "b", (1400, 1700, 1700, 1900), 200_000),
        operation(1, "b", (1700, 1700, 1700, 1900), 200_000),
    ]
    return trace(operations, spans)


def events(rank: int, name: str, times: tuple[float, ...], number: int) -> list[dict[str, Any]]:
    """As the timeline writes an operation."""
    about = {"cat": "allreduce", "id": f"{rank}.0.{number}", "pid": rank, "tid": 0}
    title, made, before = f"allreduce {name}", [], None
    for state, at in zip(("POSTED", "MATCHED", "RUNNING", "DONE"), times, strict=False):
        args = {"state": state, "bytes": 1000, "process_set": 0}
        if before is None:
            made.append({"ph": "b", "name": title, **about, "ts": at, "args": args})
        else:
            made.append({"ph": "e", "name": before, **about, "ts": at})
        if state == "DONE":
            made.append({"ph": "e", "name": title, **about, "ts": at, "args": args})
        else:
            made.append({"ph": "b", "name": state, **about, "ts": at, "args": args})
        before = state
    return made


def title(rank: int, name: str = "") -> dict[str, Any]:
    args = {"name": name or f"rank {rank} on host{rank}"}
    return {"ph": "M", "pid": rank, "name": "process_name", "args": args}


def clock(rank: int, when: str, at: float, offset: float, error: float) -> dict[str, Any]:
    args = {"when": when, "at": at, "offset_us": offset, "error_us": error}
    return {"ph": "M", "pid": rank, "tid": 0, "name": "hvdlite_clock", "args": args}


def written(path: Path, made: list[dict[str, Any]]) -> str:
    lines = "\n,".join(json.dumps(event) for event in made)
    path.write_text(f"[\n{lines}\n]\n")
    return str(path)
