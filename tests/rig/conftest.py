"""Several hosts on this machine (tests/cluster), with real ssh and real addresses between them.

hvdrun runs inside of server1, as on the first of several real hosts.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.needs import lacking
from tests.programs import Finished, run_program
from tests.worlds import MPIS, ROOT, python_of

HOSTS = 3
LIMIT_S = 90.0
# What runs on an idle host.
IDLE = ("sshd", "_host", "ps")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "rig: on several hosts; needs root, sshd and ip")


class Rig:
    """server1 … server3."""

    def __init__(self, folder: Path, share: Path) -> None:
        self.share = share  # a folder that this machine and all hosts see
        self._environment = {**os.environ, "CLUSTER_DIR": str(folder)}

    def __call__(self, *words: str | Path, check: bool = True) -> str:
        """Runs `cluster WORDS` and returns what it prints."""
        done = subprocess.run(
            [ROOT / "tests" / "cluster", *words],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def inside(self, host: str, *command: str | Path) -> list[str | Path]:
        """The command that runs another one inside of a host."""
        folder = f"CLUSTER_DIR={self._environment['CLUSTER_DIR']}"
        return ["env", folder, ROOT / "tests" / "cluster", "exec", host, "--", *command]

    def processes(self, host: str) -> list[str]:
        """What runs on a host beside its own services."""
        lines = self("exec", host, "ps", "-eo", "stat=,comm=,args=", check=False).splitlines()
        found = [line.split(maxsplit=2) for line in lines]
        return [
            words[2]
            for words in found
            if len(words) == 3
            and not words[0].startswith("Z")
            and words[1] not in IDLE
            and not words[2].startswith(("sshd:", "ps "))
            and "_host" not in words[2]
        ]

    def files(self, host: str) -> list[str]:
        """What lies in the host's own folders for temporary files."""
        names = self("exec", host, "ls", "-A", "/tmp", "/dev/shm").split()
        # MPICH 5.0's daemon leaves it after MPI_Abort, and nobody else knows its name.
        return [name for name in names if not name.startswith("hydra_hwloc_xmlfile_")]

    def assert_nothing_left(self) -> None:
        deadline = time.monotonic() + 20
        left: dict[str, list[str]] = {"?": []}
        while left and time.monotonic() < deadline:
            left = {h: p for h in self.hosts if (p := self.processes(h))}
            if left:
                time.sleep(0.1)
        assert not left, f"processes left behind: {left}"

    @property
    def hosts(self) -> list[str]:
        return [f"server{number + 1}" for number in range(HOSTS)]


def shared_with_hosts(*folders: Path) -> list[str | Path]:
    """cluster's options: of these, the hosts see those in folders of their own only if told so."""
    own = (Path("/tmp"), Path("/dev/shm"), Path("/run"))
    below = [folder for folder in folders if any(path in folder.resolve().parents for path in own)]
    return [word for folder in below for word in ("--share", folder)]


@pytest.fixture(scope="session")
def _rig() -> Iterator[Rig]:
    if os.geteuid():
        lacking("the rig of several hosts needs root")
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    for tool, package in (("sshd", "openssh-server"), ("ip", "iproute2"), ("tc", "iproute2")):
        if not shutil.which(tool, path=path):
            lacking(f"the rig of several hosts needs {tool}: apt-get install {package}")
    with tempfile.TemporaryDirectory(prefix="hvdlite-rig-") as folder:
        share = Path(folder, "share")
        share.mkdir()
        rig = Rig(Path(folder, "cluster"), share)
        try:
            rig("up", str(HOSTS), *shared_with_hosts(share, ROOT, python_of("mpich").parents[1]))
            yield rig
        finally:
            rig("down")


@pytest.fixture
def rig(_rig: Rig) -> Iterator[Rig]:
    """The hosts, all up; afterwards they are so again, and nothing runs on them."""
    yield _rig
    for line in _rig("list").splitlines()[1:]:
        host, _, state, *_ = line.split()
        if state == "dead":
            _rig("start", host)
        elif state == "cut":
            _rig("heal", host)
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
