"""Runs the examples as their users do: with hvdrun, or plainly with Python."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.needs import lacking
from tests.worlds import MPIS, ROOT, end_tree, python_of

LIMIT_S = 120.0


class Finished:
    """A process that has ended, and what it wrote."""

    def __init__(self, code: int, stdout: str, stderr: str) -> None:
        self.code, self.stdout, self.stderr = code, stdout, stderr

    def __repr__(self) -> str:
        return f"exit code {self.code}\n-- stdout\n{self.stdout}\n-- stderr\n{self.stderr}"


def run_command(command: list[str | Path]) -> Finished:
    """Runs it in the repository's root; after the limit everything that it started is ended."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        end_tree(process)
        stdout, stderr = process.communicate()
        pytest.fail(f"no end after {LIMIT_S:g} s\n{Finished(-1, stdout, stderr)}")
    return Finished(process.returncode, stdout, stderr)


def example(name: str) -> str:
    return str(Path("examples") / name)


@pytest.fixture(params=MPIS)
def mpi(request: pytest.FixtureRequest) -> str:
    """An MPI that is there."""
    name: str = request.param
    mpiexec = python_of(name).parent / "mpiexec"
    if not mpiexec.exists():
        lacking(f"no {name}: {mpiexec} does not exist; `make build`")
    return name


@pytest.fixture
def hvdrun(mpi: str) -> Callable[..., Finished]:
    """hvdrun(ranks, script, *arguments) under that MPI."""

    def run(ranks: int, script: str, *arguments: str) -> Finished:
        python = python_of(mpi)
        launcher = python.with_name("hvdrun")
        return run_command([launcher, "-np", str(ranks), python, example(script), *arguments])

    return run


@pytest.fixture
def alone() -> Callable[..., Finished]:
    """alone(script, *arguments): one process, without a launcher."""

    def run(script: str, *arguments: str) -> Finished:
        return run_command([sys.executable, example(script), *arguments])

    return run
