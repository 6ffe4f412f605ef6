"""Several hosts on this machine (tests/cluster), with real ssh and real addresses between them.

hvdrun runs inside of server1, as on the first of several real hosts.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from benchmarks.rig import lacking as what_a_rig_lacks
from benchmarks.rig import shared_with_hosts
from tests.harness.needs import lacking
from tests.harness.programs import Finished, run_program
from tests.harness.worlds import MPIS, ROOT, end_tree, python_of

HOSTS = 3
LIMIT_S = 90.0
FAILED_START_S = 10.0
# For each command that damages a host, the command that restores it.
REMEDIES = {"cut": "heal", "kill": "start", "slow": "heal"}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "rig: on several hosts; needs root, sshd and ip")


# A program that says that it is up, in MPI, and then waits.
WAITS = "from mpi4py import MPI\nimport time\nprint('up', flush=True)\ntime.sleep(90)"


@contextlib.contextmanager
def job(command: Sequence[str | Path], ranks: int = 0) -> Iterator[subprocess.Popen[str]]:
    """The command that starts a job, with pipes to read, once so many ranks have printed "up". At
    the end, however it comes, all its processes are ended and the pipes closed."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout
    assert process.stderr
    try:
        for _ in range(ranks):
            line = process.stdout.readline()
            if not line.endswith(" up\n"):
                pytest.fail(f"the job did not start:\n{line}{_said_until_its_end(process)}")
        yield process
    finally:
        end_tree(process)
        process.stdout.close()
        process.stderr.close()


def _said_until_its_end(process: subprocess.Popen[str]) -> str:
    """What a job has still printed, which has some time to end by itself."""
    assert process.stdout
    assert process.stderr
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(FAILED_START_S)
    end_tree(process)
    return f"{process.stdout.read()}-- stderr\n{process.stderr.read()}"


class Rig:
    """server1 … server3."""

    def __init__(self, folder: Path, share: Path) -> None:
        self.share = share  # a folder that this machine and all hosts see
        self.services = {"sshd"}  # programs that the hosts run for the tests
        self._environment = {**os.environ, "CLUSTER_DIR": str(folder)}
        self._remedies: dict[str | Path, str] = {}
        self._spaces: dict[str, str] = {}
        self._mounts: list[tuple[str, Path]] = []
        self._renamed: set[str] = set()

    def __call__(self, *words: str | Path) -> str:
        """Runs `cluster WORDS` and returns what it prints."""
        if words[0] in REMEDIES:
            self._remedies[words[1]] = REMEDIES[str(words[0])]
        done = subprocess.run(
            [ROOT / "tests" / "cluster", *words],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def up(self, *options: str | Path) -> None:
        """Starts the hosts."""
        self("up", str(HOSTS), *options)
        self._spaces = self._process_spaces()

    def restore(self) -> None:
        """All hosts are up and linked again."""
        for host, remedy in self._remedies.items():
            self(remedy, host)
        if "start" in self._remedies.values():
            self._spaces = self._process_spaces()
        self._remedies.clear()
        for host, path in reversed(self._mounts):
            self("exec", host, "umount", path)
        self._mounts.clear()
        for host in self._renamed:
            self("exec", host, "hostname", host)
        self._renamed.clear()

    def rename(self, host: str, name: str) -> None:
        """The host calls itself so; the others know it by the name that it had."""
        self("exec", host, "hostname", name)
        self._renamed.add(host)

    def cover(self, host: str, path: Path, source: Path | str) -> None:
        """One host sees another file or folder at that path: `source`, or one with that text."""
        if isinstance(source, str):
            text = source
            source = self.share / f"covers-{len(list(self.share.iterdir()))}"
            source.write_text(text)
            source.chmod(0o755)
        self("exec", host, "mount", "--bind", source, path.resolve())
        self._mounts.append((host, path.resolve()))

    def inside(self, host: str, *command: str | Path) -> list[str | Path]:
        """The command that runs another one inside of a host."""
        folder = f"CLUSTER_DIR={self._environment['CLUSTER_DIR']}"
        return ["env", folder, ROOT / "tests" / "cluster", "exec", host, "--", *command]

    def _process_spaces(self) -> dict[str, str]:
        """The hosts by the namespaces of their process numbers."""
        hosts = [line.split() for line in self("list").splitlines()[1:]]
        return {os.readlink(f"/proc/{pid}/ns/pid"): host for host, _, _, pid, *_ in hosts}

    def members(self) -> Iterator[tuple[str, psutil.Process]]:
        """All processes of the hosts, each with its host.

        Looked up from outside, where all their processes are seen: a ps on each host takes longer.
        """
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                host = self._spaces.get(os.readlink(f"/proc/{process.pid}/ns/pid"))
                if host:
                    yield host, process

    def processes(self) -> dict[str, list[str]]:
        """The processes on the hosts, without their own services."""
        found: dict[str, list[str]] = {}
        for host, process in self.members():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                # Their children may have other names: slurmctld forks slurmscriptd.
                ours = {process.name(), *"".join(words[:1]).split()} & self.services
                if words and "_host" not in words and not ours:
                    found.setdefault(host, []).append(" ".join(words))
        return found

    def files(self, host: str) -> list[str]:
        """The names in the host's own folders for temporary files."""
        return self("exec", host, "ls", "-A", "/tmp", "/dev/shm").split()

    def assert_nothing_left(self) -> None:
        deadline = time.monotonic() + 20
        left: dict[str, list[str]] = {"?": []}
        while left and time.monotonic() < deadline:
            left = self.processes()
            if left:
                time.sleep(0.1)
        assert not left, f"processes left behind: {left}"


@pytest.fixture(scope="session")
def _rig() -> Iterator[Rig]:
    """The hosts of the session. hvdrun's cache lies in their folder, so that it knows no others."""
    if reason := what_a_rig_lacks():
        lacking(reason)
    with tempfile.TemporaryDirectory(prefix="hvdlite-rig-") as folder:
        share = Path(folder, "share")
        share.mkdir()
        rig = Rig(Path(folder, "cluster"), share)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(share / "cache"))
            try:
                rig.up(*shared_with_hosts(share, ROOT, python_of("mpich").parents[1]))
                yield rig
            finally:
                rig("down")


@pytest.fixture
def rig(_rig: Rig) -> Iterator[Rig]:
    """The hosts, all up. After the test they are restored, and nothing may run on them."""
    yield _rig
    _rig.restore()
    _rig.assert_nothing_left()


@pytest.fixture(params=MPIS)
def python(request: pytest.FixtureRequest) -> Path:
    """The interpreter of an environment with that MPI, at the same path on every host."""
    path = python_of(request.param)
    if not (path.parent / "mpiexec").exists():
        lacking(f"no {request.param}: {path.parent / 'mpiexec'} does not exist; `make build`")
    return path


@pytest.fixture
def hvdrun(rig: Rig, python: Path) -> Callable[..., Finished]:
    """hvdrun(*arguments) on server1, in the environment of that MPI."""

    def run(*arguments: str | Path) -> Finished:
        command = rig.inside("server1", python.with_name("hvdrun"), *arguments)
        return run_program(command, LIMIT_S)

    return run


@pytest.fixture
def nothing_remembered(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """hvdrun's cache of answers is empty."""
    folder = re.sub(r"\W", "-", request.node.name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(rig.share / "caches" / folder))


@pytest.fixture
def files(rig: Rig) -> Iterator[None]:
    """Afterwards no host has files that it had not before."""
    before = {host: rig.files(host) for host in ("server1", "server2")}
    yield
    assert {host: rig.files(host) for host in before} == before
