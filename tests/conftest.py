"""Worlds of ranks for the tests, and the check that the tests leave nothing behind."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.needs import lacking
from tests.worlds import (
    MPIS,
    SESSION_VARIABLE,
    Key,
    Pool,
    orphaned_files,
    python_of,
    remove_files_of_mpi,
    shared_files,
)

SIZES = (1, 2, 3, 4, 7)


@dataclass(frozen=True)
class WorldRequest:
    """A parameter of the fixture `world`."""

    mpi: str
    size: int
    hosts: str | None

    def __str__(self) -> str:
        layout = f"hosts {self.hosts}" if self.hosts else f"{self.size} ranks"
        return f"{self.mpi}, {layout}"


class PlacedWorld:
    """A world, on one host or on several pretended ones."""

    def __init__(self, pool: Pool, request: WorldRequest) -> None:
        self._pool = pool
        self.mpi = request.mpi
        self.size = request.size
        self.hosts = request.hosts

    def run(
        self,
        case: Callable[..., Any],
        *args: Any,
        knobs: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """See `World.run`. After a failure the next call gets a new world."""
        __tracebackhide__ = True
        placed = dict(knobs or {})
        if self.hosts is not None:
            placed["HVDLITE_HOST_RANKS"] = self.hosts
        world = self._pool.world(Key(self.mpi, self.size))
        return world.run(case, *args, knobs=placed, **kwargs)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mpi", action="append", help="only the worlds under this MPI")
    parser.addoption(
        "--world", action="append", help="only worlds of this shape: 3 (ranks), or 2,1 (hosts)"
    )


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "ranks(*sizes): the numbers of ranks of the fixture `world`, all on one host",
        "hosts(*layouts): the ranks on each pretended host, such as '2,2', for the fixture `world`",
        "mpis(*names): the MPIs of the fixture `world`; by default both",
    ):
        config.addinivalue_line("markers", line)
    os.environ[SESSION_VARIABLE] = str(uuid.uuid4())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world" not in metafunc.fixturenames:
        return

    def marked(name: str, default: tuple[Any, ...]) -> tuple[Any, ...]:
        mark = metafunc.definition.get_closest_marker(name)
        return mark.args if mark else default

    shapes = metafunc.config.getoption("--world")
    layouts = marked("hosts", ())
    sizes = marked("ranks", () if layouts else SIZES)
    requests = [
        request
        for mpi in marked("mpis", MPIS)
        if mpi in (metafunc.config.getoption("--mpi") or MPIS)
        for request in (
            *(WorldRequest(mpi, size, None) for size in sizes),
            *(WorldRequest(mpi, sum(map(int, hosts.split(","))), hosts) for hosts in layouts),
        )
        if not shapes or (request.hosts or str(request.size)) in shapes
    ]
    metafunc.parametrize("world", requests, indirect=True, ids=str)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the same world stand together, so that each world is started once.

    In it those with the same knobs, so that hvdlite is seldom shut down.
    """

    def order(item: pytest.Item) -> tuple[Any, ...]:
        callspec = getattr(item, "callspec", None)
        request = callspec.params.get("world") if callspec else None
        if callspec is None or not isinstance(request, WorldRequest):
            return ("", 0, "", "")
        return (request.mpi, request.size, request.hosts or "", str(callspec.params.get("knobs")))

    items.sort(key=order)


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """At the end no process of this session lives, and it left no file in /dev/shm.

    But for those of an MPI whose ranks a test has killed, which are removed.
    """
    before = shared_files()
    yield
    deadline = time.monotonic() + 10
    while (left := own_processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"processes left behind: {left}"
    remove_files_of_mpi(before)
    files = sorted(orphaned_files(before))
    assert not files, f"files left behind: {files}"


def own_processes() -> list[str]:
    """The command lines of all processes that this session started."""
    marker = f"{SESSION_VARIABLE}={os.environ[SESSION_VARIABLE]}".encode()
    found = []
    for process in psutil.process_iter():
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            if process.pid != os.getpid() and marker in environment.split(b"\0"):
                found.append(f"{process.pid}: {' '.join(process.cmdline())}")
        except (OSError, psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.fixture(scope="session")
def pool(nothing_left_behind: None) -> Iterator[Pool]:
    """The worlds of this session."""
    worlds = Pool()
    yield worlds
    worlds.close()


@pytest.fixture
def world(request: pytest.FixtureRequest, pool: Pool) -> PlacedWorld:
    """Ranks that run cases; under which MPI, how many and where is a parameter of the test."""
    wanted: WorldRequest = request.param
    python = python_of(wanted.mpi)
    if not (python.parent / "mpiexec").exists():
        lacking(f"no {wanted.mpi}: {python.parent / 'mpiexec'} does not exist; `make build`")
    return PlacedWorld(pool, wanted)
