"""The figures of a report, as PNG files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import BOUND, OURS, PASSES, Row, busbw, rows_by_place, size_text
from benchmarks.plan import Place
from benchmarks.tail import SITUATIONS

DPI = 90


def draw(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draws every plot that the report has figures for; returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    # A curve has more points than one.
    places = {p: rows for p, rows in rows_by_place(report["runs"]).items() if len(rows) > 1}
    one_host = {place: rows for place, rows in places.items() if place.hosts == 1}
    hosts = {place: rows for place, rows in places.items() if place.hosts > 1}
    tails = [run for run in report["runs"] if run.get("tail")]
    written = []
    for name, found in (("allreduce", one_host), ("hosts", hosts)):
        if found:
            written.append(by_size(found, folder / f"{name}.png"))
    if tails:
        written.append(tail(tails[0]["tail"], folder / "tail.png"))
    return written


def by_size(places: Mapping[Place, Sequence[Row]], path: Path) -> Path:
    """Time and bus bandwidth by size, on log axes; one row of panels for each place."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        len(places), 2, figsize=(11, 3.6 * len(places)), squeeze=False, layout="constrained"
    )
    for (place, rows), (times, bandwidths) in zip(places.items(), panels, strict=True):
        for name in dict.fromkeys(name for row in rows for name in row.time_s):
            there = [row for row in rows if name in row.time_s]
            sizes = [row.size_bytes for row in there]
            seconds = [row.time_s[name] for row in there]
            bus = [busbw(b, s, place.size) / 1e9 for b, s in zip(sizes, seconds, strict=True)]
            width = 2.5 if name == OURS else 1.2
            style = {BOUND: "k--", PASSES: "k:"}.get(name, "o-")
            times.plot(sizes, [s * 1e6 for s in seconds], style, lw=width, ms=3, label=name)
            bandwidths.plot(sizes, bus, style, lw=width, ms=3, label=name)
        times.set(title=str(place), ylabel="median time, µs")
        bandwidths.set(title="higher is better", ylabel="bus bandwidth, GB/s")
        ticks: list[int] = []
        for row in rows:
            if not ticks or row.size_bytes >= 16 * ticks[-1]:  # else the texts would overlap
                ticks.append(row.size_bytes)
        for panel in (times, bandwidths):
            panel.set(xlabel="buffer", xscale="log", yscale="log")
            panel.set_xticks(ticks, [size_text(size) for size in ticks], minor=False)
            panel.minorticks_off()
            panel.grid(alpha=0.3)
            panel.legend(fontsize="small")
    return _save(figure, path)


def tail(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Histograms of the times of single calls; a row of panels for each size."""
    from matplotlib import pyplot

    sizes = list(dict.fromkeys(row["bytes"] for row in rows))
    figure, panels = pyplot.subplots(
        len(sizes),
        len(SITUATIONS),
        figsize=(11, 3 * len(sizes)),
        squeeze=False,
        sharex=True,
        layout="constrained",
    )
    for row in rows:
        panel = panels[sizes.index(row["bytes"])][SITUATIONS.index(row["situation"])]
        edges, counts = zip(*row["histogram"], strict=True)
        percent = [100 * count / row["calls"] for count in counts]
        width = 2.5 if row["contender"] == OURS else 1.2
        microseconds = [edge * 1e6 for edge in edges]
        panel.plot(microseconds, percent, "o-", ms=3, lw=width, label=row["contender"])
        panel.set(
            title=f"{size_text(row['bytes'])}, {row['situation']}",
            xlabel="µs from the last arrival to the last result",
            ylabel="% of the calls",
            xscale="log",
            yscale="log",
        )
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    return _save(figure, path)


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(path, dpi=DPI)
    pyplot.close(figure)
    return path
