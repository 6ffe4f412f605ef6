"""What `python -m hvdlite.report` says of a timeline."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from hvdlite.report.critical_path import Paths, shares
from hvdlite.report.figures import late_ranks, percentile, steps
from hvdlite.report.trace import Trace, in_line, match

MOST_ROWS = 16
LONGEST_NAME = 72


def lines(trace: Trace, title: str) -> Iterator[str]:
    matched = match(trace.operations)
    aligned = in_line(trace, matched)
    counts = f"ranks: {len(trace.ranks)}, operations: {len(trace.operations):,}"
    yield f"{shown(title)}: {counts}"
    yield from (f"note: {shown(note, 400)}" for note in trace.notes)
    if left_out := len(matched) - len(aligned):
        yield f"note: {left_out} operations do not fit together in time and are left out"
    yield from _steps(trace, Paths(trace.spans, aligned))
    late = sorted(late_ranks(trace, aligned), key=lambda each: -each.total_us)
    if not late:
        yield "no operation of several ranks has ended"
        return
    error_us = max(trace.errors.values(), default=0.0)
    yield (
        "who posts an operation last, in how many, by how much after the one before (the median),"
        " and in all"
        + (f"; the clocks may be wrong by {time_text(error_us)}:" if error_us else ":")
    )
    for each in late[:MOST_ROWS]:
        part = percent(each.last / each.operations)
        unsure = f"; too close to tell in {each.too_close:,}" if each.too_close else ""
        yield (
            f"  {part:>5}  {time_text(each.median_us):>8}  {time_text(each.total_us):>8}"
            f"  {_rank(trace, each.rank)}, of {each.operations:,} operations{unsure}"
        )


def _steps(trace: Trace, paths: Paths) -> Iterator[str]:
    if not (made := steps(trace.spans)):
        return
    lengths = [step.us for step in made]
    longest = max(made, key=lambda step: step.us)
    yield (
        f"steps without the first: {len(made):,}; the median takes {time_text(median(lengths))},"
        f" 95 % at most {time_text(percentile(lengths, 0.95))},"
        f" the longest {time_text(longest.us)} (step {longest.number})"
    )
    yield "the critical path, the parts of a step's length: of all, per step, in how many steps:"
    whole_us = sum(lengths) or 1.0
    for each in shares([paths.of(step) for step in made])[:MOST_ROWS]:
        name = shown(each.operation) or f"computation on {_rank(trace, each.rank)}"
        per_step = time_text(each.us / len(made))
        yield f"  {percent(each.us / whole_us):>5}  {per_step:>8}  {each.steps:>8,}  {name}"


def _rank(trace: Trace, rank: int) -> str:
    return shown(trace.ranks.get(rank, f"rank {rank}"))


def shown(name: object, longest: int = LONGEST_NAME) -> str:
    """A name of the user's, in which nothing is invisible or endless."""
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(name))
    half = longest // 2
    return text if len(text) <= longest else f"{text[:half]}…{text[-half:]}"


def time_text(us: float) -> str:
    """Three digits, with the unit that suits: 0.45 µs, 31.0 ms, 1.20 s."""
    units = (("s", 1e6), ("ms", 1e3), ("µs", 1.0))
    unit, factor = next((each for each in units if abs(us) >= 0.9995 * each[1]), units[-1])
    number = us / factor
    digits = 2 if abs(number) < 10 else 1 if abs(number) < 100 else 0
    return f"{number:,.{digits}f} {unit}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"
