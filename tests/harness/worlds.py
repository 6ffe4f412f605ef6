"""Worlds of n ranks that stay up between tests, so that each test need not import torch n times.

A world is `mpiexec -n N python -m tests.harness.rank`. Every rank connects to the pytest process by
a socket of its own; the cases go through these and not through MPI, so that waiting for the next
one costs nothing, the MPI and hvdlite of the ranks belong to the cases alone, and a rank that dies
or hangs is known by name.

A case is a function in a test module, that runs on every rank:

    def ranks_add_up(factor):
        hvd.init()
        ...
        return something picklable

    @pytest.mark.ranks(2, 3)
    def test_the_sum_is_that_of_all_ranks(world):
        results = world.run(ranks_add_up, 10)  # a list, by rank
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent.parent
MPIS = ("openmpi", "mpich")

START_LIMIT_S = 120.0
IMPORT_LIMIT_S = 120.0
# A world's first optimizer imports torch._dynamo: seconds, on a busy machine a minute.
CASE_LIMIT_S = 120.0
# When one rank has failed, the others may go on for so long: they often wait for it in vain.
GRACE_S = 5.0
END_LIMIT_S = 60.0
LOOK_AGAIN_S = 0.1
# Who waits for so long and wakes up much later was on a machine that stood still.
SLICE_S = 1.0

ADDRESS_VARIABLE = "HVDLITE_TEST_ADDRESS"
# Is set in the environment of every process that a test session starts, so that it can find them.
SESSION_VARIABLE = "HVDLITE_TEST_SESSION"

PR_SET_PDEATHSIG = 1
# A rank writes its stacks then. No case has handlers of its own for it, as for SIGUSR1.
STACKS_SIGNAL = signal.SIGRTMAX
_libc = ctypes.CDLL(None, use_errno=True)


class RanksFailed(AssertionError):
    """A case failed on some ranks: their tracebacks, stacks and output."""


class WorldError(RuntimeError):
    """A world could not be started."""


@dataclass(frozen=True)
class Key:
    """An MPI and a number of ranks: what identifies a world."""

    mpi: str
    size: int


class Ready:
    """A rank has imported the case's module: from here on its time is limited."""


@dataclass
class Answer:
    """The result of a case on one rank, or its failure."""

    value: Any = None
    failure: str | None = None


def python_of(mpi: str) -> Path:
    """The interpreter whose environment has this MPI; it need not exist."""
    if mpi == "openmpi":
        return Path(os.environ.get("HVDLITE_TEST_OPENMPI") or sys.executable)
    default = ROOT / ".venv-mpich" / "bin" / "python"
    return Path(os.environ.get("HVDLITE_TEST_MPICH") or default)


def mpiexec_command(mpi: str, size: int) -> list[str]:
    """Starts `size` ranks on this machine, also as root and on fewer cores."""
    mpiexec = str(python_of(mpi).parent / "mpiexec")
    if mpi == "mpich":
        return [mpiexec, "-n", str(size)]
    return [
        *(mpiexec, "-n", str(size), "--oversubscribe", "--allow-run-as-root"),
        *("--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"),
        # libfabric takes seconds to look for networks that a single machine has no use for.
        *("--mca", "btl", "^ofi", "--mca", "mtl", "^ofi"),
    ]


def die_with_parent() -> None:
    """Between fork and exec: no orphan outlives a pytest process that was killed."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Limit:
    """A limit of time in which the machine runs: a virtual machine may be stopped for a minute and
    go on, and no rank is to blame for that."""

    def __init__(self, limit_s: float) -> None:
        self._left_s = limit_s

    def wait(self, connections: Sequence[Connection]) -> list[Any]:
        """Those that can be read; none once the limit has passed."""
        while True:
            slice_s = min(max(0.0, self._left_s), SLICE_S)
            begun = time.monotonic()
            ready = wait(connections, slice_s)
            self._left_s -= min(time.monotonic() - begun, slice_s)
            if ready or self._left_s <= 0.0:
                return ready

    def shorten(self, limit_s: float) -> None:
        self._left_s = min(self._left_s, limit_s)


class World:
    """n ranks under one MPI. Any failure ends it: the state of its ranks can't be trusted then."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.alive = True
        self._folder = tempfile.TemporaryDirectory(prefix="hvdlite-world-")
        self._files_before = shared_files()
        self._launcher: subprocess.Popen[bytes] | None = None
        self._ranks: dict[int, Connection] = {}
        self._pids: dict[int, int] = {}
        # The sizes of the logs when the last case began, in bytes.
        self._written: dict[str | int, int] = {}
        try:
            self._start()
        except BaseException:
            self.kill()
            raise

    def _start(self) -> None:
        # In the abstract namespace: there is no file to leave behind.
        address = f"hvdlite-test-{os.urandom(16).hex()}"
        environment = {
            **os.environ,
            ADDRESS_VARIABLE: address,
            "HVDLITE_TEST_FOLDER": self._folder.name,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        # The runtime of a sanitizer belongs into the ranks, not into mpiexec (`make sanitize`).
        preload = os.environ.get("HVDLITE_TEST_PRELOAD")
        command = [
            *mpiexec_command(self.key.mpi, self.key.size),
            *(["env", f"LD_PRELOAD={preload}"] if preload else []),
            *(str(python_of(self.key.mpi)), "-m", "tests.harness.rank"),
        ]
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind("\0" + address)
            listener.listen(self.key.size)
            log = stack.enter_context(open(self._log("mpiexec"), "wb"))
            self._launcher = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
            deadline = time.monotonic() + START_LIMIT_S
            ended = os.pidfd_open(self._launcher.pid)
            stack.callback(os.close, ended)
            while len(self._ranks) < self.key.size:
                ready = wait([listener, ended], max(0.0, deadline - time.monotonic()))
                if listener in ready:
                    connection = Connection(listener.accept()[0].detach())
                    try:
                        rank, pid = connection.recv()
                    except EOFError:  # the rank has died; mpiexec's end, just below, says why
                        continue
                    self._ranks[rank] = connection
                    self._pids[rank] = pid
                    continue
                cause = "ended" if ready else f"was not up after {START_LIMIT_S:g} s"
                raise WorldError(f"{self} {cause}: {' '.join(command)}\n{self._output()}")

    def run(
        self,
        case: Callable[..., Any],
        *args: Any,
        limit_s: float = CASE_LIMIT_S,
        knobs: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Runs `case(*args, **kwargs)` on every rank; the results by rank, or RanksFailed.

        knobs: environment variables. hvdlite is shut down first where they differ from those of the
        case before, so that `init` reads them.
        """
        __tracebackhide__ = True
        writers: list[str | int] = ["mpiexec", *self._ranks]
        for who in writers:
            log = self._log(who)
            self._written[who] = log.stat().st_size if log.exists() else 0
        try:
            for connection in self._ranks.values():
                connection.send(
                    (case.__module__, case.__qualname__, args, kwargs, dict(knobs or {}))
                )
            answers = self._answers(limit_s)
        except BaseException:
            self.kill()
            raise
        if len(answers) == self.key.size and not any(a.failure for a in answers.values()):
            return [answers[rank].value for rank in range(self.key.size)]
        report = self._report(case, answers, limit_s)
        self.kill()
        raise RanksFailed(report)

    def _answers(self, limit_s: float) -> dict[int, Answer]:
        """The answers that come before the limit, or until shortly after the first failure.

        Before the limit counts, all ranks import the case's module: with torch, that takes long on
        a busy machine.
        """
        answers: dict[int, Answer] = {}
        importing = set(self._ranks)
        missing = dict(self._ranks)
        limit = Limit(IMPORT_LIMIT_S)
        while missing:
            ready = limit.wait(list(missing.values()))
            if not ready:
                break
            for rank in [rank for rank, connection in missing.items() if connection in ready]:
                try:
                    answer = missing[rank].recv()
                except (EOFError, ConnectionResetError):
                    answer = Answer(failure="the process died\n")
                if isinstance(answer, Answer):
                    answers[rank] = answer
                    del missing[rank]
                if rank in importing:
                    importing.remove(rank)
                    if not importing and not any(a.failure for a in answers.values()):
                        limit = Limit(limit_s)
                if isinstance(answer, Answer) and answer.failure:
                    limit.shorten(GRACE_S)
        return answers

    def _report(self, case: Callable[..., Any], answers: dict[int, Answer], limit_s: float) -> str:
        hung = [rank for rank in range(self.key.size) if rank not in answers]
        if hung:
            self._ask_for_stacks(hung)
        failures: dict[str, list[int]] = {}
        for rank, answer in sorted(answers.items()):
            if answer.failure:
                failures.setdefault(answer.failure, []).append(rank)
        lines = [f"{case.__qualname__} on {self}:"]
        if hung:
            since = f"{GRACE_S:g} s after the first failure" if failures else f"after {limit_s:g} s"
            lines += [f"---- {_named(hung)} had not ended {since}"]
        lines += [self._output()]
        # They come last: long reports are often cut at their beginning.
        for failure, ranks in failures.items():
            lines += [f"---- {_named(ranks)}:", failure.rstrip()]
        return "\n".join(lines)

    def _ask_for_stacks(self, ranks: Sequence[int]) -> None:
        """The ranks' fault handlers write their stacks into their logs."""
        before = {rank: self._log_bytes(rank) for rank in ranks}
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], STACKS_SIGNAL)
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline and any(
            self._log_bytes(rank) == size for rank, size in before.items()
        ):
            time.sleep(0.05)

    def _log(self, who: str | int) -> Path:
        return Path(self._folder.name, f"{who}.log")

    def _log_bytes(self, rank: int) -> int:
        return self._log(rank).stat().st_size

    def _output(self) -> str:
        """What it has written since the last case began."""
        lines = []
        for who in ("mpiexec", *range(self.key.size)):
            path = self._log(who)
            written = path.read_bytes()[self._written.get(who, 0) :] if path.exists() else b""
            text = written.decode(errors="replace").strip()
            if text:
                lines += [f"---- output of {who if who == 'mpiexec' else f'rank {who}'}:"]
                lines += [text[-8000:]]
        return "\n".join(lines)

    def close(self) -> None:
        """Lets the ranks end as a program does; kills those that don't."""
        if not self.alive:
            return
        for connection in self._ranks.values():
            connection.close()
        assert self._launcher is not None
        try:
            code = self._launcher.wait(END_LIMIT_S)
            failure = f"exit code {code}" if code else None
        except subprocess.TimeoutExpired:
            failure = f"no end within {END_LIMIT_S:g} s"
        output = self._output() if failure else ""
        self.kill()
        if failure:
            raise RanksFailed(f"the end of {self}: {failure}\n{output}")

    def kill(self) -> None:
        """Ends all its processes, and removes what they left in shared memory."""
        self.alive = False
        for connection in self._ranks.values():
            connection.close()
        if self._launcher is not None:
            end_tree(self._launcher, self._pids.values())
        remove_files_of_mpi(self._files_before)
        self._folder.cleanup()

    def __str__(self) -> str:
        return f"{self.key.size} ranks under {self.key.mpi}"


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def end_tree(launcher: subprocess.Popen[Any], others: Iterable[int] = ()) -> None:
    """Ends a launcher with all that it started: TERM, so that it can clean up, then KILL."""
    family: list[psutil.Process] = []
    for pid in {launcher.pid, *others}:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            family += [process, *process.children(recursive=True)]
    if launcher.poll() is None:
        launcher.terminate()
    _, alive = psutil.wait_procs([p for p in family if p.pid != launcher.pid], timeout=3)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    try:
        launcher.wait(3)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()
    psutil.wait_procs(alive, timeout=10)


def shared_files() -> set[str]:
    """The files in /dev/shm."""
    return {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}


def orphaned_files(before: set[str]) -> set[str]:
    """The files in /dev/shm that are newer than `before` and that no process has mapped.

    Those of other runs on this machine are mapped by their processes. A process may just have
    created one, so that only what is unmapped twice counts.
    """
    files = unmapped(shared_files() - before)
    if files:
        time.sleep(LOOK_AGAIN_S)
        files = unmapped(files)
    return files


def unmapped(files: set[str]) -> set[str]:
    """Those of the files that exist and that no process has mapped."""
    files = set(files)
    for process in psutil.process_iter() if files else ():
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            files -= {line.split(maxsplit=5)[-1] for line in maps.splitlines()}
    return {path for path in files if os.path.exists(path)}


def remove_files_of_mpi(before: set[str]) -> None:
    """Removes files of MPIs whose ranks were killed: MPIs remove them only at a regular end."""
    for path in orphaned_files(before):
        if Path(path).name.startswith(("mpich_shm_", "sm_segment.")):
            Path(path).unlink(missing_ok=True)


class Pool:
    """The worlds of a test session. One is up at a time: memory and cores are few."""

    def __init__(self) -> None:
        self._world: World | None = None

    def world(self, key: Key) -> World:
        """The world that is up, if it is the one asked for; else a new one instead of it."""
        if self._world is not None and (self._world.key != key or not self._world.alive):
            self.close()
        if self._world is None:
            self._world = World(key)
        return self._world

    def close(self) -> None:
        """Ends the world that is up."""
        world, self._world = self._world, None
        if world is not None:
            world.close()


def text_of(error: BaseException) -> str:
    """A traceback without the frames of the harness."""
    trace = error.__traceback__
    return "".join(traceback.format_exception(type(error), error, trace and trace.tb_next))
