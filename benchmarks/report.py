"""What a run has found: tables for the terminal, a plot, JSON."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.figures import BOUND, OURS, algbw, busbw, of_bound, ratio, size_text

NOTE = """\
Times are medians over the rounds; each is the slowest rank's, from leaving a barrier to having the
result. algbw = bytes/time and busbw = algbw · 2(n-1)/n are hvdlite's, in GB/s (1e9). ratio = the
best peer's time over hvdlite's: above 1 hvdlite is faster. copy: each rank reads and writes the
buffer once, all ranks at once, which is a bound; of copy: which part of its speed hvdlite reaches.
Every result was checked."""

BUSY_LOAD = 0.5  # processes that were running on average in the minute before


def allreduce_table(run: dict[str, Any]) -> Table:
    names = list(run["allreduce"][0]["median_s"])
    table = Table(title=f"Allreduce in place, float32 sum, {heading(run)}: µs")
    for column in ["size", *names, "algbw", "busbw", "of copy", "ratio"]:
        table.add_column(column, justify="right")
    for row in run["allreduce"]:
        size_bytes, medians_s = row["bytes"], row["median_s"]
        ours_s = medians_s[OURS]
        table.add_row(
            size_text(size_bytes),
            *[f"{medians_s[name] * 1e6:.1f}" for name in names],
            f"{algbw(size_bytes, ours_s) / 1e9:.3g}",
            f"{busbw(size_bytes, ours_s, run['ranks']) / 1e9:.3g}",
            f"{of_bound(medians_s):.0%}",
            f"{ratio(medians_s):.2f}",
        )
    return table


def training_table(run: dict[str, Any]) -> Table:
    names = list(run["training"][0]["median_s"])
    table = Table(title=f"Training step, {heading(run)}: ms")
    table.add_column("task")
    for column in [*names, "ratio"]:
        table.add_column(column, justify="right")
    for row in run["training"]:
        medians_s = row["median_s"]
        table.add_row(
            row["task"],
            *[f"{medians_s[name] * 1e3:.2f}" for name in names],
            f"{ratio(medians_s):.2f}",
        )
    return table


def heading(run: dict[str, Any]) -> str:
    return f"{run['ranks']} ranks, {run['mpi']} (threads: {run['mpi_thread_level']})"


def print_tables(report: dict[str, Any], console: Console) -> None:
    host = ", ".join(f"{key} {value}" for key, value in report["host"].items())
    console.print(f"Host: {host}", highlight=False)
    if report["host"]["load_before"] > BUSY_LOAD:
        console.print("The machine was busy before: these figures are no basis for anything.")
    for run in report["runs"]:
        console.print(allreduce_table(run))
        console.print(training_table(run))
    console.print(NOTE, highlight=False)


def write_json(report: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(report, indent=2) + "\n")


def plot(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Time and bus bandwidth by size, on log axes; one row of panels for each run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        len(runs), 2, figsize=(11, 4 * len(runs)), squeeze=False, layout="constrained"
    )
    for run, (times, bandwidths) in zip(runs, panels, strict=True):
        sizes = [row["bytes"] for row in run["allreduce"]]
        for name in run["allreduce"][0]["median_s"]:
            seconds = [row["median_s"][name] for row in run["allreduce"]]
            bus = [busbw(b, s, run["ranks"]) / 1e9 for b, s in zip(sizes, seconds, strict=True)]
            width = 2.5 if name == OURS else 1.2
            style = "k--" if name == BOUND else "o-"
            times.plot(sizes, [s * 1e6 for s in seconds], style, lw=width, ms=3, label=name)
            bandwidths.plot(sizes, bus, style, lw=width, ms=3, label=name)
        times.set(title=heading(run), ylabel="median time, µs")
        bandwidths.set(title="higher is better", ylabel="bus bandwidth, GB/s")
        for panel in (times, bandwidths):
            panel.set(xlabel="buffer", xscale="log", yscale="log")
            panel.set_xticks(sizes[::2], [size_text(size) for size in sizes[::2]], minor=False)
            panel.minorticks_off()
            panel.grid(alpha=0.3)
            panel.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
