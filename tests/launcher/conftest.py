"""Runs hvdrun as its user does, under both MPIs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.harness.needs import lacking
from tests.harness.programs import Finished, run_program
from tests.harness.worlds import MPIS, ROOT, python_of
from tests.launcher.terminal import Terminal

LIMIT_S = 60.0


@pytest.fixture(params=MPIS)
def python(request: pytest.FixtureRequest) -> Path:
    """The interpreter of an environment with that MPI."""
    path = python_of(request.param)
    if not (path.parent / "mpiexec").exists():
        lacking(f"no {request.param}: {path.parent / 'mpiexec'} does not exist; `make build`")
    return path


@pytest.fixture
def hvdrun(python: Path) -> Callable[..., Finished]:
    """hvdrun(*arguments) in that environment."""

    def run(*arguments: str | Path, cwd: str | Path = ROOT) -> Finished:
        return run_program([python.with_name("hvdrun"), *arguments], LIMIT_S, cwd)

    return run


@pytest.fixture
def terminal(python: Path) -> Iterator[Terminal]:
    it = Terminal(python)
    yield it
    it.close()


@pytest.fixture
def snapshot(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """snapshot(name, text): the text is that of snapshots/NAME.txt beside the test; with
    UPDATE_SNAPSHOTS=1 it becomes so."""

    def check(name: str, text: str) -> None:
        path = request.path.parent / "snapshots" / f"{name}.txt"
        if os.environ.get("UPDATE_SNAPSHOTS"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text.rstrip("\n") + "\n")
        assert text.rstrip("\n") + "\n" == path.read_text()

    return check
