"""What a process and those that it has started do at this moment, from /proc."""

from __future__ import annotations

import contextlib
import os
import time

from hvdrun.machine.cgroups import throttling
from hvdrun.machine.kernel_waits import kernel_wait

MOST_PROCESSES = 16
SHOWN = 120  # characters of a command


def look(
    pid: int,
    stack: tuple[list[list[object]], str] | None = None,
    stopped_s: float | None = None,
) -> bytes:
    """The process and its descendants, in JSON: `at`, the seconds of a clock, and `processes`, rows
    of number, parent, state as in /proc/PID/stat, seconds of CPU used so far, command, whether an
    MPI is loaded, and what it waits for (see `kernel_wait`). The first row is `pid`'s; there is
    none if it has ended. `quotas`: of `pid`, see `throttling`. `stack`: what `agent.rank.notes` has
    read. `stopped_s`: for how long a signal has stopped `pid`, if the caller knows. If no file can
    be opened, the answer is empty: a keeper must not end because of that."""
    try:
        import json

        known, children = _table()
    except (OSError, ImportError):
        return b""
    found: list[list[object]] = []
    queue = [pid]
    while queue and len(found) < MOST_PROCESSES:
        number = queue.pop(0)
        if number in known:
            # Who reads the memory of a process that hangs in the kernel may hang, too.
            hangs = known[number][1] == "D"
            has_mpi = not hangs and _has_mpi(number)
            waits = kernel_wait(number, known[number][1])
            found.append([number, *known[number], _command(number, hangs), has_mpi, waits])
            queue += children.get(number, [])
    answer: dict[str, object] = {
        "at": time.monotonic(),
        "processes": found,
        "quotas": {folder: counts[:2] for folder, counts in throttling(pid).items()},
        "stopped_s": stopped_s,
    }
    if stack is not None:
        answer["frames"], answer["no_frames"] = stack
    return json.dumps(answer).encode()


def _table() -> tuple[dict[int, tuple[int, str, float]], dict[int, list[int]]]:
    """All processes: parent, state, CPU; and the children of each."""
    known: dict[int, tuple[int, str, float]] = {}
    children: dict[int, list[int]] = {}
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
                parent = int(fields[1])
                cpu_s = (int(fields[11]) + int(fields[12])) * tick_s
                known[int(entry)] = parent, fields[0].decode(), cpu_s
                children.setdefault(parent, []).append(int(entry))
    return known, children


def _command(pid: int, only_name: bool) -> str:
    for name in ("comm",) if only_name else ("cmdline", "comm"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
            words = file.read(4 * SHOWN).decode(errors="replace").strip("\0\n").split("\0")
            text = " ".join(" ".join([os.path.basename(words[0]), *words[1:]]).split())
            if text:
                return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
    return "?"


def _has_mpi(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as file:
        return b"/libmpi" in file.read()
    return False
