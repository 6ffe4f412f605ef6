"""What hvdrun says about ranks that wait in hvd.init() or MPI_Init for others. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from hvdrun.errors import MpirunFailed, StartTimeout
from hvdrun.output.folding import spans
from hvdrun.reports.failure_report import duration

# A process that uses this share of a core computes.
BUSY = 0.05
STATES = {
    "T": "is stopped (`kill -CONT {pid}` there lets it go on)",
    "t": "is stopped by a debugger",
    "D": "waits for a disk or a file server (in the kernel, uninterruptible)",
    "Z": "has ended",
    "X": "has ended",
}
SHUTDOWN_VARIABLE = "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS"
ADVICE = (
    "every rank must call hvd.init(): call it before any `sys.exit()`, `return` or `if` that only"
    " some of the ranks take"
)


class Process(NamedTuple):
    pid: int
    parent: int
    state: str
    cpu_s: float
    command: str
    has_mpi: bool


class Look(NamedTuple):
    """What a rank's command, the first of the processes, did at a moment of its host's clock."""

    at: float
    processes: tuple[Process, ...]


def read_look(data: bytes) -> Look | None:
    """What `machine.looks` has packed; None for anything else. Commands are made printable, as they
    may have been chosen to deceive a terminal."""
    try:
        given = json.loads(data)
        rows = [
            Process(
                int(pid),
                int(parent),
                str(state)[:1],
                float(cpu_s),
                "".join(c if c.isprintable() else "?" for c in str(command)),
                bool(has_mpi),
            )
            for pid, parent, state, cpu_s, command, has_mpi in given["processes"]
        ]
        return Look(float(given["at"]), tuple(rows))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def activity(before: Look | None, now: Look) -> str:
    """What the rank does: 'computes (0.9 s of CPU in the last 1.0 s): python train.py (process 7)'.
    `before`: the look before this one."""
    if not now.processes:
        return "has just ended"
    used = _cpu_used(before, now)
    main, *others = now.processes
    parts = [f"{_doing(main, used, before, now)}: {main.command} (process {main.pid})"]
    if not _is_busy(main, used, now, before) and (child := _to_name(others, used, before, now)):
        parts.append(
            f"its child process {child.pid} ({child.command}) {_doing(child, used, before, now)}"
        )
    if any(process.has_mpi for process in now.processes):
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
    if process.state in STATES:
        return STATES[process.state].format(pid=process.pid)
    busy = _is_busy(process, used, now, before)
    if before and not busy:
        return "sleeps"
    since = f"in the last {duration(now.at - before.at)}" if before else "so far"
    return f"{'computes' if busy else 'sleeps'} ({used[process.pid]:.1f} s of CPU {since})"


def _to_name(
    others: Sequence[Process], used: Mapping[int, float], before: Look | None, now: Look
) -> Process | None:
    """The descendant that says most about what the rank waits for."""
    alive = [process for process in others if process.state not in ("Z", "X")]
    return max(
        alive,
        key=lambda p: (p.state in STATES, _is_busy(p, used, now, before), -p.pid),
        default=None,
    )


def _the_ranks(ranks: Collection[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + spans(sorted(ranks))


def _of(ranks: Collection[int], one: str, many: str) -> str:
    return one if len(ranks) == 1 else many


def waiting(
    waits: Collection[int],
    missing: Collection[int],
    where: str,
    for_s: float,
    lines: Iterable[str],
    shutdown_s: float,
) -> str:
    """`lines`: what the missing ranks do."""
    limit = f"; the job ends at {shutdown_s:g} s ({SHUTDOWN_VARIABLE})" if shutdown_s else ""
    head = (
        f"hvdrun: {_the_ranks(waits)} {_of(waits, 'waits', 'wait')} in {where} for"
        f" {_the_ranks(missing)}, which {_of(missing, 'has', 'have')} not called it"
        f" ({duration(for_s)} so far{limit}):"
    )
    return "\n".join([head, *(f"    {line}" for line in lines)])


def gathered(where: str, after_s: float) -> str:
    return f"hvdrun: all ranks are in {where}, after {duration(after_s)}"


def not_in_init(
    waits: Collection[int], missing: Mapping[int, str], where: str, shutdown_s: float
) -> StartTimeout:
    """`missing`: rank → its host."""
    by_host: dict[str, list[int]] = {}
    for rank, host in missing.items():
        by_host.setdefault(host, []).append(rank)
    names = " and ".join(f"{_the_ranks(ranks)} on {host}" for host, ranks in by_host.items())
    return StartTimeout(
        f"{names} {_of(missing, 'has', 'have')} not called {where}, where {_the_ranks(waits)}"
        f" {_of(waits, 'has', 'have')} waited for {shutdown_s:g} s ({SHUTDOWN_VARIABLE}); {ADVICE};"
        " or give a longer time if a rank prepares something before"
    )


def left_before_init(
    rank: int, host: str, after_s: float, waits: Collection[int], where: str
) -> MpirunFailed:
    """A rank ended with 0 before it called init, where others wait."""
    return MpirunFailed(
        f"rank {rank} on {host} ended with exit code 0 after {duration(after_s)} and had not called"
        f" {where}, where {_the_ranks(waits)} waited for it; {ADVICE}"
    )
