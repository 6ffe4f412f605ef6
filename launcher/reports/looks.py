"""What a rank's processes do, as their keeper has seen it, and in words. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from hvdrun.reports.failure_report import duration

# A process that uses this share of a core computes.
BUSY = 0.05
# What helpers that have nothing to do wait for, as the kernel tells it (`machine.looks`).
WAITS_FOR_WORK = ("", "waits for a file, a socket or a pipe", "waits for data from a pipe")
# A cgroup whose CPU quota was used up in this part of its periods holds its processes up.
THROTTLED = 0.25
STATES = {
    "T": "is stopped{since} (`kill -CONT {pid}` there lets it go on)",
    "t": "is stopped by a debugger",
    "D": "waits for a disk or a file server (in the kernel, uninterruptible)",
    "Z": "has ended",
    "X": "has ended",
}


class Process(NamedTuple):
    """waits: what it waits for, as the kernel tells it; "" if it does not."""

    pid: int
    parent: int
    state: str
    cpu_s: float
    command: str
    has_mpi: bool
    waits: str = ""


class Frame(NamedTuple):
    """A call in Python. library: whose code it is; "": the script's own."""

    file: str
    line: int
    function: str
    library: str


class Look(NamedTuple):
    """What a rank's command, the first of the processes, did at a moment of its host's clock.

    frames: its calls, the innermost first; None if they were not asked for. no_frames: why there
    are none. stopped_s: for how long a signal has stopped it; None: not known, or it is not.
    quotas: by cgroup, the periods of its CPU quota so far, and in how many it was used up.
    """

    at: float
    processes: tuple[Process, ...]
    frames: tuple[Frame, ...] | None = None
    no_frames: str = ""
    stopped_s: float | None = None
    quotas: Mapping[str, tuple[int, int]] = MappingProxyType({})


def read_look(data: bytes) -> Look | None:
    """What `machine.looks` has packed; None for anything else. Texts are made printable, as they
    may have been chosen to deceive a terminal."""
    try:
        given = json.loads(data)
        rows = []
        for pid, parent, state, cpu_s, command, has_mpi, waits in given["processes"]:
            words = _printable(command), bool(has_mpi), _printable(waits)
            rows.append(Process(int(pid), int(parent), str(state)[:1], float(cpu_s), *words))
        frames = None
        if "frames" in given:
            frames = tuple(
                Frame(_printable(file), int(line), _printable(function), _printable(library))
                for file, line, function, library in given["frames"]
            )
        stopped_s = given.get("stopped_s")
        stopped_s = None if stopped_s is None else float(stopped_s)
        quotas = {
            _printable(folder): (int(periods), int(used_up))
            for folder, (periods, used_up) in given.get("quotas", {}).items()
        }
        no_frames = _printable(given.get("no_frames", ""))
        return Look(float(given["at"]), tuple(rows), frames, no_frames, stopped_s, quotas)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None


def _printable(text: object) -> str:
    return "".join(c if c.isprintable() else "?" for c in str(text))


def activity(before: Look | None, now: Look, names_mpi: bool = True) -> str:
    """What the rank does: 'computes (0.9 s of CPU in the last 1.0 s): python train.py (process 7)'.
    `before`: the look before this one. names_mpi: whether to say that it has loaded MPI."""
    if not now.processes:
        return "has just ended"
    used = _cpu_used(before, now)
    main, *others = now.processes
    parts = [f"{_doing(main, used, before, now)}: {main.command} (process {main.pid})"]
    if not _is_busy(main, used, now, before) and (child := _to_name(others, used, before, now)):
        parts.append(
            f"its child process {child.pid} ({child.command}) {_doing(child, used, before, now)}"
        )
    if names_mpi and any(process.has_mpi for process in now.processes):
        parts.append("it has loaded MPI")
    return "; ".join(parts)


def _cpu_used(before: Look | None, now: Look) -> dict[int, float]:
    """Seconds of CPU since the last look; of a new process, all of them."""
    old = {process.pid: process.cpu_s for process in before.processes} if before else {}
    return {p.pid: max(0.0, p.cpu_s - old.get(p.pid, 0.0)) for p in now.processes}


def _is_busy(process: Process, used: Mapping[int, float], now: Look, before: Look | None) -> bool:
    if before is None:
        return process.state == "R"
    return used[process.pid] > BUSY * max(now.at - before.at, 0.1)


def _doing(process: Process, used: Mapping[int, float], before: Look | None, now: Look) -> str:
    if process.state == "D" and process.waits:
        return f"{process.waits} (in the kernel, uninterruptible)"
    if process.state in STATES:
        is_known = now.stopped_s is not None and process is now.processes[0]
        since = f", for {duration(now.stopped_s or 0.0)} now" if is_known else ""
        return STATES[process.state].format(pid=process.pid, since=since)
    busy = _is_busy(process, used, now, before)
    would_run = busy or process.state == "R"  # one that sleeps is not held up by a quota
    if before and would_run and process is now.processes[0] and (why := _throttled(before, now)):
        since = f"in the last {duration(now.at - before.at)}"
        return f"is {why} ({used[process.pid]:.1f} s of CPU {since})"
    does = "computes" if busy else process.waits or "sleeps"
    if before and not busy:
        return does
    since = f"in the last {duration(now.at - before.at)}" if before else "so far"
    return f"{does} ({used[process.pid]:.1f} s of CPU {since})"


def _throttled(before: Look, now: Look) -> str:
    """The quotas hold back the rank's whole cgroup, and so its first process. Empty if they do
    not."""
    most, text = 0.0, ""
    for folder, (periods, used_up) in now.quotas.items():
        old_periods, old_used_up = before.quotas.get(folder, (periods, used_up))
        count, full = periods - old_periods, used_up - old_used_up
        if count > 0 and full / count > most:
            most = full / count
            text = (
                f"throttled by its cgroup, whose CPU quota was used up in {full} of {count} periods"
            )
    return text if most >= THROTTLED else ""


def _to_name(
    others: Sequence[Process], used: Mapping[int, float], before: Look | None, now: Look
) -> Process | None:
    """The descendant that says most about what the rank waits for. Those that wait for work, as a
    DataLoader's workers do, say least."""
    alive = [process for process in others if process.state not in ("Z", "X")]
    return max(
        alive,
        key=lambda p: (
            p.state in STATES,
            _is_busy(p, used, now, before),
            p.waits not in WAITS_FOR_WORK,
            -p.pid,
        ),
        default=None,
    )
