"""Shows the results of a run: on the terminal, and on the page of the documentation."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import table as rich_table
from rich.console import Console

from benchmarks.tables import Table

NOTE = """\
Times are medians over the rounds; each is the slowest rank's, from leaving a barrier to having the
result. busbw = bytes/time · 2(n-1)/n is hvdlite's, in GB/s (1e9). ratio = the best peer's time over
hvdlite's in the same run: above 1 hvdlite is faster. The bounds: copy, each rank reads and writes
the buffer once, all ranks at once; streams, plain TCP carries 2(H-1)/H of the buffer from each host
to the next, all at once. "of" a bound: which part of its speed hvdlite reaches. Horovod (derived):
DDP's time in this run over a ratio that was measured elsewhere. Every result was checked."""
BUSY = "The machine was busy before: these figures are no basis for anything."
BUSY_LOAD = 0.5  # processes that were running on average in the minute before
BEGIN, END = "<!-- measured: written by make bench -->", "<!-- end of what is measured -->"


def host_line(host: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in host.items())


def remarks(report: Mapping[str, Any]) -> list[str]:
    """What to know before reading a figure."""
    busy = [BUSY] if report["host"]["load_before"] > BUSY_LOAD else []
    lacking = [f"Not measured: {reason}." for reason in report["not_measured"]]
    failed = [f"Failed: {job}." for job in report["failed"]]
    earlier = [
        f"Of an earlier run: {', '.join(run['parts'])}; measured on: {host_line(run['host'])}."
        for run in report.get("earlier", ())
    ]
    return [*busy, *lacking, *failed, *earlier]


def print_report(report: Mapping[str, Any], tables: Sequence[Table], console: Console) -> None:
    """The targets come last, where they are seen."""
    console.print(f"Host: {host_line(report['host'])}", highlight=False)
    targets, *others = tables
    for table in [*others, *([targets] if targets.rows else [])]:
        console.print(_rich(table))
    console.print(NOTE, highlight=False)
    for remark in remarks(report):
        console.print(remark)


def _rich(table: Table) -> rich_table.Table:
    made = rich_table.Table(title=table.title)
    for number, column in enumerate(table.columns):
        made.add_column(column, justify="left" if number == 0 or table.prose else "right")
    for row in table.rows:
        made.add_row(*row)
    return made


def markdown(report: Mapping[str, Any], tables: Sequence[Table], figures: Sequence[str]) -> str:
    """The text between the marks of the page. figures: paths, from the page."""
    parts = [f"Measured on: {host_line(report['host'])}.", *remarks(report)]
    targets, *others = tables
    parts.append(_markdown(targets))
    parts += [f"![{Path(figure).stem}]({figure})" for figure in figures]
    parts += [_markdown(table) for table in others]
    parts.append(NOTE)
    return "\n\n".join(parts)


def _markdown(table: Table) -> str:
    aligned = ["---" if i == 0 or table.prose else "---:" for i in range(len(table.columns))]
    lines = [table.columns, aligned, *table.rows]
    return f"### {table.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def replace_measured(page: str, measured: str) -> str:
    """The page with its text between the marks replaced."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no line {BEGIN!r}, or none {END!r} behind it")
    return f"{before}{BEGIN}\n\n{measured}\n\n{END}{after}"
