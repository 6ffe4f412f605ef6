"""Runs the examples as their users do: with hvdrun, or plainly with Python.

`make test` runs each under one MPI: what hvdlite and hvdrun do under either has tests of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.needs import lacking
from tests.harness.programs import Finished, run_program
from tests.harness.worlds import MPIS, python_of

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
def alone() -> Callable[..., Finished]:
    """alone(script, *arguments): one process, without a launcher."""

    def run(script: str, *arguments: str) -> Finished:
        return run_program([sys.executable, EXAMPLES / script, *arguments], LIMIT_S)

    return run
