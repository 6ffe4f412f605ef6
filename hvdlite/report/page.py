"""The page: what it shows of a timeline, in the words of its readers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from statistics import median
from typing import Any

import jinja2

from hvdlite.report.critical_path import Paths, Segment, shares
from hvdlite.report.figures import (
    Step,
    bandwidths,
    late_ranks,
    moving,
    overlaps,
    percentile,
    steps,
)
from hvdlite.report.trace import Operation, Trace, in_line, match

# Longer series are drawn as so many bars, each the longest step of its part.
MOST_BARS = 240
MOST_SHARES = 12
MOST_LANES = 16
LONGEST_NAME = 72
# The width of drawings, in units of their own.
WIDTH = 960.0


def html(trace: Trace, title: str) -> str:
    """The whole page, which loads nothing."""
    loader = jinja2.FileSystemLoader(os.path.dirname(__file__))
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(time=time_text, size=size_text, shown=shown, percent=percent)
    return environment.get_template("page.html").render(facts(trace, title))


def facts(trace: Trace, title: str) -> dict[str, Any]:
    """What the template shows."""
    matched = match(trace.operations)
    aligned = in_line(trace, matched)
    notes = list(trace.notes)
    if len(aligned) < len(matched):
        notes.append(
            f"{len(matched) - len(aligned)} operations of several ranks do not fit together in "
            "time and are left out of what compares ranks"
        )
    made = steps(trace.spans)
    paths = Paths(trace.spans, aligned)
    of_steps = [paths.of(step) for step in made]
    lengths = [step.us for step in made]
    middle = _median_step(made)
    return {
        "title": title,
        "notes": notes,
        "ranks": trace.ranks,
        "operations": len(trace.operations),
        "steps": made,
        "median": median(lengths) if lengths else 0.0,
        "p95": percentile(lengths, 0.95) if lengths else 0.0,
        "longest": max(made, key=lambda step: step.us) if made else None,
        "bars": bars(made),
        "overlaps": overlaps(trace, made, aligned),
        "bandwidths": bandwidths(aligned),
        "late": late_ranks(trace, aligned),
        "shares": shares(of_steps)[:MOST_SHARES],
        "path_us": sum(segment.us for path in of_steps for segment in path) or 1.0,
        "picture": picture(trace, made[middle], of_steps[middle], aligned)
        if middle is not None
        else None,
        "clocks": clock_rows(trace),
        "drift_from": trace.drift_from,
        "width": WIDTH,
    }


def _median_step(made: Sequence[Step]) -> int | None:
    if not made:
        return None
    order = sorted(range(len(made)), key=lambda i: made[i].us)
    return order[(len(order) - 1) // 2]


def bars(made: Sequence[Step]) -> list[dict[str, Any]]:
    """The drawing of steps: x, height and what a pointer is told."""
    if not made:
        return []
    per_bar = -(-len(made) // MOST_BARS)
    parts = [made[i : i + per_bar] for i in range(0, len(made), per_bar)]
    highest = max(step.us for step in made)
    width = WIDTH / len(parts)
    drawn = []
    for i, part in enumerate(parts):
        longest = max(part, key=lambda step: step.us)
        height = 118 * longest.us / highest
        text = f"step {longest.number}: {time_text(longest.us)}"
        drawn.append(
            {"x": i * width, "width": max(0.8, width * 0.85), "height": height, "text": text}
        )
    return drawn


def picture(
    trace: Trace,
    step: Step,
    path: Sequence[Segment],
    matched: Sequence[dict[int, Operation]],
) -> dict[str, Any]:
    """A step in time: for each rank its backward passes, waits and operations, and its part of the
    critical path."""
    ranks = sorted(step.of_ranks)
    if len(ranks) > MOST_LANES:
        on_path = {segment.rank for segment in path}
        first = sorted(ranks, key=lambda rank: (rank not in on_path, rank))[:MOST_LANES]
        ranks = sorted(first)
    scale = WIDTH / step.us
    inside = [
        of_ranks
        for of_ranks in matched
        if any(end > step.begin and begin < step.end for begin, end in moving(of_ranks).values())
    ]
    lanes = []
    for rank in ranks:
        boxes = []
        for span in trace.spans:
            if span.rank == rank and span.kind in ("BACKWARD", "WAIT"):
                row = {"BACKWARD": 0, "WAIT": 1}[span.kind]
                boxes.append((span.kind.lower(), row, span.name, span.begin, span.end))
        for of_ranks in inside:
            if rank in of_ranks:
                boxes.append(("moving", 2, of_ranks[rank].label, *moving(of_ranks)[rank]))
        for segment in path:
            if segment.rank == rank:
                text = segment.operation or "computation"
                kind = "path-moves" if segment.operation else "path"
                boxes.append((kind, 3, text, segment.begin, segment.end))
        drawn = [
            {
                "kind": kind,
                "row": row,
                "x": (max(begin, step.begin) - step.begin) * scale,
                "width": max(1.0, (min(end, step.end) - max(begin, step.begin)) * scale),
                "text": f"{shown(text)}: {time_text(end - begin)}",
            }
            for kind, row, text, begin, end in boxes
            if end > step.begin and begin < step.end
        ]
        lanes.append({"rank": rank, "boxes": drawn})
    return {"step": step, "lanes": lanes, "left_out": len(step.of_ranks) - len(ranks)}


def clock_rows(trace: Trace) -> list[dict[str, Any]]:
    start = trace.clocks.get("start", {})
    return [
        {
            "rank": rank,
            "offset": start[rank][1].offset,
            "error": trace.errors.get(rank, 0.0),
            "drift": trace.drifts.get(rank),
        }
        for rank in sorted(start)
    ]


def shown(name: object, longest: int = LONGEST_NAME) -> str:
    """A name of the user's, in which nothing is invisible or endless."""
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(name))
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]}…{text[-half:]}"


def time_text(us: float) -> str:
    """Three digits, with the unit that suits: 0.45 us, 31.0 ms, 1.20 s."""
    for unit, factor in (("s", 1e6), ("ms", 1e3)):
        if abs(us) >= factor * 0.9995:
            return f"{_three_digits(us / factor)} {unit}"
    return f"{_three_digits(us)} µs"


def _three_digits(number: float) -> str:
    size = abs(number)
    return f"{number:.2f}" if size < 10 else f"{number:.1f}" if size < 100 else f"{number:,.0f}"


def size_text(size_bytes: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= factor:
            return f"{size_bytes // factor} {unit}"
    return f"{size_bytes} B"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def default_output(path: str) -> str:
    return os.path.splitext(path)[0] + ".html"
