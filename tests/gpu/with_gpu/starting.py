"""Starts programs on ranks, and ends each with all its processes when its time is over.

Imports neither torch nor hvdlite.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent.parent
BUILD = ROOT / "build" / "gpu"
LIBRARY = BUILD / "lib"
# What a launcher gets to end its ranks by itself.
LAST_WORDS_S = 5.0
TIMED_OUT = 124


@dataclass(frozen=True)
class World:
    """On how many ranks a program runs, and how tensors on a GPU travel between them."""

    name: str
    ranks: int
    variables: Mapping[str, str]


def worlds(device: str, gpus: int) -> list[World]:
    """Those that this machine can have."""
    if device == "cpu":
        return [World("one rank", 1, {}), World("two ranks", 2, {})]
    shared = {"HVDLITE_GPU": "0"}
    nccl = {"HVDLITE_GPU_COLLECTIVES": "nccl"}
    found = [
        World("one rank, NCCL", 1, nccl),
        World("two ranks, staged", 2, {**shared, "HVDLITE_GPU_COLLECTIVES": "staged"}),
    ]
    if gpus > 1:
        return [*found, World(f"{gpus} ranks, NCCL", gpus, nccl)]
    own = {**shared, **nccl, "OWN_NCCL_HOSTID": "1"}
    return [*found, World("two ranks, NCCL on one GPU", 2, own)]


def mpiexec() -> str | None:
    """The launcher of the interpreter's environment, or of the system."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


@functools.cache
def _options() -> tuple[str, ...]:
    """Open MPI refuses root, and more ranks than cores."""
    done = subprocess.run([str(mpiexec()), "--version"], capture_output=True, text=True)
    is_open_mpi = any(w in done.stdout for w in ("Open MPI", "OpenRTE", "prte", "PRRTE"))
    lenient = ("--oversubscribe", "--allow-run-as-root", "--bind-to", "none")
    return lenient if is_open_mpi else ()


def on_ranks(ranks: int, command: Sequence[str]) -> list[str]:
    """The command that runs the interpreter with these arguments on so many ranks."""
    program = [sys.executable, *command]
    if ranks == 1:
        return program
    return [str(mpiexec()), "-n", str(ranks), *_options(), *program]


def environment(device: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Of a program. It finds hvdlite as run.py has built it, or as it is installed."""
    places = [str(ROOT)]
    if LIBRARY.exists():
        places.insert(0, str(LIBRARY))
    return {
        # Small networks: a pool of compilers for each rank would take the cores.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        # All ranks are on this machine, which may have no network.
        "NCCL_SOCKET_IFNAME": "lo",
        # A rank that waits for one that has failed raises an error, too.
        "HVDLITE_STALL_CHECK_TIME_SECONDS": "10",
        "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "60",
        **os.environ,
        **variables,
        "DEVICE": device,
        "PYTHONPATH": os.pathsep.join(places),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
    }


def run(
    command: Sequence[str], variables: Mapping[str, str], limit_s: float, output: Path
) -> tuple[int, float]:
    """The exit code, and how long it took. What it prints goes to the file."""
    begin = time.monotonic()
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = TIMED_OUT
            end(process)
        except BaseException:
            end(process)
            raise
    return code, time.monotonic() - begin


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends it and its process group: a launcher ends its ranks when it is told to."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(LAST_WORDS_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
