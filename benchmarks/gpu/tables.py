"""The results of a job as lines of text. Pure."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

COLUMNS = ("step_ms", "host_ms", "held_MiB", "peak_MiB")
OURS = "hvdlite"


def lines(job: Mapping[str, Any]) -> list[str]:
    """A title, and what is below it.

    >>> lines({"title": "steps", "skipped": "no time was left"})
    ['', '## steps', 'left out: no time was left']
    """
    head = ["", f"## {job['title']}"]
    if "skipped" in job:
        return [*head, f"left out: {job['skipped']}"]
    if "failed" in job:
        return [*head, f"FAILED: {job['failed']}", *(f"    {line}" for line in job["output"])]
    shown = {"steps": _steps, "operations": _operations}.get(job["part"], _as_json)
    return [*head, *shown(job["result"])]


def _steps(result: Mapping[str, Any]) -> list[str]:
    rows = [["", *COLUMNS, "over hvdlite's", "host over hvdlite's"]]
    for name in result["step_ms"]:
        cells = [_number(result[column][name]) for column in COLUMNS]
        ratios = [result[c][name] / result[c][OURS] for c in ("step_ms", "host_ms")]
        rows.append([name, *cells, *(f"{ratio:.2f}" for ratio in ratios)])
    rest = {key: result[key] for key in ("rounds", "steps_per_block")}
    text = [", ".join(f"{key} {value}" for key, value in rest.items())]
    if "largest_difference_from_ddp" in result:
        text.append(f"largest difference from DDP: {result['largest_difference_from_ddp']:.1e}")
    if "sync_in_step" in result:
        text.append(f"synchronization in a step: {result['sync_in_step'] or 'none'}")
    return [*_aligned(rows), *text]


def _operations(result: Mapping[str, Any]) -> list[str]:
    by_size = result["median_us"]
    names = list(next(iter(by_size.values())))
    peers = [name for name in names if name != OURS]
    rows = [["bytes", *(f"{name}, µs" for name in names), *(f"{p} / hvdlite" for p in peers)]]
    for size, times in by_size.items():
        ratios = [f"{times[peer] / times[OURS]:.2f}" for peer in peers]
        rows.append([size, *(_number(times[name]) for name in names), *ratios])
    copies = result.get("pinned_GB_s", {})
    text = ", ".join(f"{way} {speed:.1f} GB/s" for way, speed in copies.items())
    return [*_aligned(rows), *([f"pinned memory: {text}"] if text else [])]


def _as_json(result: Mapping[str, Any]) -> list[str]:
    return [f"{key}: {json.dumps(value)}" for key, value in result.items()]


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 or value == 0 else f"{value:.3g}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
