"""Runs the examples as their users do: with hvdrun, or plainly with Python.

`make test` runs each under one MPI: what hvdlite and hvdrun do under either has tests of its own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.needs import lacking
from tests.harness.programs import Finished, run_program
from tests.harness.worlds import MPIS, ROOT, end_tree, python_of

LIMIT_S = 120.0
EXAMPLES = Path("examples")


@pytest.fixture(scope="session", params=MPIS)
def mpi(request: pytest.FixtureRequest) -> str:
    """An MPI that is there."""
    name: str = request.param
    mpiexec = python_of(name).parent / "mpiexec"
    if not mpiexec.exists():
        lacking(f"no {name}: {mpiexec} does not exist; `make build`")
    return name


@pytest.fixture(scope="session")
def hvdrun(mpi: str) -> Callable[..., Finished]:
    """hvdrun(ranks, script, *arguments) under that MPI: what rank 0 prints, the others nothing."""
    python = python_of(mpi)

    def run(ranks: int, script: str, *arguments: str) -> Finished:
        command: list[str | Path] = [python.with_name("hvdrun"), "-np", str(ranks)]
        run = run_program([*command, python, EXAMPLES / script, *arguments], LIMIT_S)
        for other in range(1, ranks):
            assert not run.of_rank(other).stdout, run
        return run.of_rank(0)

    return run


@pytest.fixture(scope="session")
def preempted(mpi: str) -> Callable[..., Finished]:
    """preempted(at, ranks, script, *arguments): hvdrun gets TERM, as from a batch system, when rank
    0 has printed a line that begins so; what rank 0 prints."""
    python = python_of(mpi)

    def run(at: str, ranks: int, script: str, *arguments: str) -> Finished:
        command: list[str | Path] = [python.with_name("hvdrun"), "-np", str(ranks)]
        process = subprocess.Popen(
            [*command, python, EXAMPLES / script, *arguments],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        limit = threading.Timer(LIMIT_S, end_tree, [process])
        limit.start()
        lines = []
        with process:
            for line in process.stdout or ():
                lines.append(line)
                if line.startswith(f"[0] {at}"):
                    process.send_signal(signal.SIGTERM)
        limit.cancel()
        return Finished(process.returncode, "".join(lines), "").of_rank(0)

    return run


@pytest.fixture(scope="session")
def alone() -> Callable[..., Finished]:
    """alone(script, *arguments): one process, without a launcher."""

    def run(script: str, *arguments: str) -> Finished:
        return run_program([sys.executable, EXAMPLES / script, *arguments], LIMIT_S)

    return run
