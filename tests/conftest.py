"""Worlds of ranks for the tests, and the check that the tests leave nothing behind."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest

import hvdlite as hvd
from tests.harness.needs import lacking
from tests.harness.side_by_side import PARTS
from tests.harness.wide import Variant, targets
from tests.harness.worlds import (
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

# How fast a machine is must not decide what passes.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

# A shell lets processes in its background ignore Ctrl-C and QUIT, and their children would inherit
# that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The same for nohup and the end of the terminal. This process goes on ignoring them, its children
# don't inherit a handler.
for ignored in (signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, lambda *_: None)


def end_in_good_order(number: int, frame: object) -> None:
    """As at Ctrl-C, the fixtures take down all that they have set up, such as the rig's hosts."""
    signal.signal(number, lambda *_: None)  # `timeout` sends it twice
    raise KeyboardInterrupt


signal.signal(signal.SIGTERM, end_in_good_order)


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

    def end(self) -> None:
        """Later cases get a new world: the processes of this one are no longer as they were."""
        self._pool.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mpi", action="append", help="only the worlds under this MPI")
    parser.addoption(
        "--world", action="append", help="only worlds of this shape: 3 (ranks), or 2,1 (hosts)"
    )
    parser.addoption("--part", choices=PARTS, help="one of the two sessions of make test")
    parser.addoption("--failed-to", type=Path, help="write the names of failed tests to this file")


@pytest.hookimpl(tryfirst=True)  # before pytest-rerunfailures looks at its options
def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "ranks(*sizes): the numbers of ranks of the fixture `world`, all on one host",
        "hosts(*layouts): the ranks on each pretended host, such as '2,2', for the fixture `world`",
        "mpis(*names): the MPIs of the fixture `world`; by default both",
        "wide: repeats what another test shows: runs in `make test-wide`, not in `make test`",
        "long: takes long, mostly on several hosts: runs in `make test-rig`, not in `make test`",
        "wide_in(*where): wide with so many ranks (3), on these hosts ('2,1') or under that MPI",
        "above_mpi: what it tests is the same under each MPI, also between hosts",
        "breaks_the_world: after it new ranks have to be started",
    ):
        config.addinivalue_line("markers", line)
    os.environ[SESSION_VARIABLE] = str(uuid.uuid4())
    if config.option.usepdb:
        config.option.reruns = 0  # the plugin refuses both together


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world" not in metafunc.fixturenames:
        return

    def marked(name: str, default: tuple[Any, ...]) -> tuple[Any, ...]:
        mark = metafunc.definition.get_closest_marker(name)
        return mark.args if mark else default

    shapes = metafunc.config.getoption("--world")
    layouts = marked("hosts", ())
    # The first may run under every MPI; one rank alone would show the least there.
    sizes = sorted(marked("ranks", () if layouts else SIZES), key=lambda size: size == 1)
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


@pytest.hookimpl(wrapper=True)  # before -m and -k select, and after
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """Marks wide tests, and sorts the tests by their worlds, so that each world starts once.

    Tests that break a world come first, before its ranks have spent time on importing torch. Then
    tests with the same knobs follow each other, so that hvdlite is seldom shut down.
    """
    choose(config, items)
    keep_part(config, items)

    def order(item: pytest.Item) -> tuple[Any, ...]:
        callspec = getattr(item, "callspec", None)
        request = callspec.params.get("world") if callspec else None
        if callspec is None or not isinstance(request, WorldRequest):
            return ("", 0, False, "", "")
        stays = item.get_closest_marker("breaks_the_world") is None
        knobs = str(callspec.params.get("knobs"))
        return (request.mpi, request.size, stays, request.hosts or "", knobs)

    items.sort(key=order)
    yield


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if path := config.getoption("--failed-to"):
        stats = terminalreporter.stats
        reports = [*stats.get("failed", []), *stats.get("error", [])]
        path.write_text("".join(f"{report.nodeid}\n" for report in reports))


# Jobs of hvdrun: in the session of the worlds, so that both take equally long.
WITH_WORLDS = {"test_signals.py", "test_starting.py", "test_run_function.py", "examples"}
# Of the tests that take long: about half of their time. Each session has a rig of its own.
LONG_WITH_WORLDS = {
    "test_links.py",
    "test_signals.py",
    "test_slurm.py",
    "test_stalls.py",
    "test_starting.py",
    "launcher",
    "world",
}


def keep_part(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the tests of the other part (tests/harness/side_by_side.py)."""
    if (part := config.getoption("--part")) is None:
        return
    kept: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        variant = variant_of(item)
        places = {*item.path.relative_to(config.rootpath).parts}
        if item.get_closest_marker("long"):
            in_first = bool(LONG_WITH_WORLDS & places)
        else:
            in_first = variant is not None and variant.shape is not None
            in_first |= bool(WITH_WORLDS & places) and "rig" not in places
        kept[in_first == (part == "worlds")].append(item)
    items[:] = kept[True]
    config.hook.pytest_deselected(items=kept[False])


# How an MPI's processes start, meet and end.
DIFFERS_WITH_MPI = {"world", "launcher", "harness", "rig"}
# What only uses the engine, and what only looks at it.
ABOVE_MPI = {"optimizer", "shared", "asynchronous", "observing", "examples"}


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks wide tests, and deselects what no target runs (tests/harness/wide.py)."""
    tests: dict[str, list[tuple[pytest.Item, Variant]]] = {}
    for item in items:
        if variant := variant_of(item):
            tests.setdefault(test_of(item), []).append((item, variant))
    left_out = set()
    for runs in tests.values():
        first = runs[0][0]
        folders = set(first.path.relative_to(config.rootpath).parts)
        matters: bool | None = True if DIFFERS_WITH_MPI & folders else None
        if ABOVE_MPI & folders or first.get_closest_marker("above_mpi"):
            matters = False
        for (item, _), target in zip(runs, targets([v for _, v in runs], matters), strict=True):
            if target == "wide":
                item.add_marker("wide")
            elif not target and not config.getoption("--mpi"):
                left_out.add(item)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def test_of(item: pytest.Item) -> str:
    """Without its parameters."""
    return item.nodeid.partition("[")[0]


def variant_of(item: pytest.Item) -> Variant | None:
    """None for a test that is run under no MPI."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return None
    mark = item.get_closest_marker("wide_in")
    where = set(mark.args if mark else ())
    is_wide = item.get_closest_marker("wide") is not None
    # By their names: pytest's indices of parameters are not the same under both MPIs.
    parameters = [callspec.params.get(name) for name in ("world", "mpi", "python")]
    for value in parameters:
        if isinstance(value, WorldRequest):
            others = callspec.id.replace(str(value), "", 1)
            shape = value.hosts or value.size
            return Variant(value.mpi, shape, others, is_wide or bool({value.mpi, shape} & where))
        if value in MPIS:
            others = callspec.id.replace(value, "", 1)
            return Variant(value, None, others, is_wide or value in where)
    return None


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """At the end no process of this session lives, and it left no file in /dev/shm.

    Files of an MPI whose ranks a test has killed are removed, and no error.
    """
    before = shared_files()
    yield
    deadline = time.monotonic() + 10
    while (left := own_processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"processes left behind: {left}"
    remove_files_of_mpi(before)
    # Those that a session beside this one is about to remove are gone soon.
    while (files := orphaned_files(before)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not files, f"files left behind: {sorted(files)}"


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


@pytest.fixture(scope="module", autouse=True)
def no_world_left() -> Iterator[None]:
    """Tests that begin a world in pytest's own process end it: other files would get it."""
    yield
    if hvd.is_initialized():
        hvd.shutdown()
        pytest.fail("hvdlite is still initialized; the fixture `world_of_one` ends what it begins")


@pytest.fixture
def world_of_one() -> Iterator[None]:
    """hvdlite in the process of pytest itself."""
    hvd.init()
    yield
    hvd.shutdown()


@pytest.fixture(scope="session")
def pool(nothing_left_behind: None) -> Iterator[Pool]:
    """The worlds of this session."""
    worlds = Pool()
    yield worlds
    worlds.close()


@pytest.fixture
def world(request: pytest.FixtureRequest, pool: Pool) -> PlacedWorld:
    """Ranks that run cases. The test's parameter says under which MPI, how many, and where."""
    wanted: WorldRequest = request.param
    python = python_of(wanted.mpi)
    if not (python.parent / "mpiexec").exists():
        lacking(f"no {wanted.mpi}: {python.parent / 'mpiexec'} does not exist; `make build`")
    return PlacedWorld(pool, wanted)
