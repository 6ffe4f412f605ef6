"""Runs a fault under one MPI, on this host or on the hosts of the rig."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from hvdrun.machine.environment import KEEPER
from tests.faults.fault import BEGINS, RANKS, STALL_S, Fault, Job
from tests.faults.judge import wrong_names
from tests.harness.worlds import end_tree, python_of
from tests.rig.conftest import Rig

START_S = 90.0
# The culprit is to be named within this time after the limit.
NAMED_S = 15.0
# Afterwards somebody else may be blamed.
LATER_S = 2.0
END_S = 20.0
PAUSE_S = 0.02


@dataclass(frozen=True)
class Outcome:
    """named_s: when the culprit was named, after the limit; None: it was not. missing: patterns
    that no text has matched."""

    fault: str
    hosts: int
    mpi: str
    named_s: float | None
    wrong: list[str]
    missing: list[str]
    text: str

    @property
    def is_right(self) -> bool:
        return self.named_s is not None and not self.wrong


class _Heard:
    """The lines of a stream, by a thread of its own, and when the first of each kind came."""

    def __init__(self, stream: IO[str]) -> None:
        self.text = ""
        self.begun_at: float | None = None
        self._stream = stream
        self._thread = threading.Thread(target=self._hear, daemon=True)
        self._thread.start()

    def _hear(self) -> None:
        for line in self._stream:
            if BEGINS in line and self.begun_at is None:
                self.begun_at = time.monotonic()
            self.text += line

    def join(self) -> None:
        self._thread.join(END_S)


def run(fault: Fault, mpi: str, folder: Path, rig: Rig | None) -> Outcome:
    """folder: for the script; the hosts of the rig see it, too."""
    hosts = 3 if rig else 1
    script = folder / "train.py"
    script.write_text(fault.script)
    where = ("-H", "server1:1,server2:1,server3:1") if rig else ("-np", str(RANKS))
    python = python_of(mpi)
    command: list[str | Path] = [
        python.with_name("hvdrun"),
        *(*where, "--grace-period", "1", *fault.options),
        *("--stall-check-warning-time-seconds", str(STALL_S), python, script),
    ]
    stack = contextlib.ExitStack
    with stack() as afterwards, stack() as ending, stack() as at_end:
        if rig:
            afterwards.callback(rig.assert_nothing_left)
            afterwards.callback(rig.restore)
        process = subprocess.Popen(
            rig.inside("server1", *command) if rig else command,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **fault.variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert process.stdout
        assert process.stderr
        ending.callback(_end, process)
        stdout, stderr = _Heard(process.stdout), _Heard(process.stderr)
        until = time.monotonic() + START_S
        while stdout.begun_at is None and process.poll() is None and time.monotonic() < until:
            time.sleep(PAUSE_S)
        before = len(stderr.text)  # a slow start may have been reported, too
        if fault.outside and stdout.begun_at:
            pid = _process(script, fault.culprit)
            cluster = rig.__call__ if rig else _no_cluster
            host = fault.host(hosts)
            fault.outside(Job(pid, host, cluster, _adder(at_end), _adder(afterwards)))
        begun_at = stdout.begun_at or time.monotonic()
        named_at = _await_name(fault, hosts, process, stderr, begun_at + fault.limit_s)
        later = time.monotonic() + LATER_S
        while process.poll() is None and time.monotonic() < later:
            time.sleep(PAUSE_S)
    stdout.join()
    stderr.join()
    text = stderr.text
    missing = [each.pattern for each in fault.patterns(hosts) if not each.search(text)]
    ranks = (fault.culprit,) if fault.blames is None else fault.blames
    right = {*(f"rank {rank}" for rank in ranks), *(f"server{rank + 1}" for rank in ranks)}
    named_s = None if named_at is None else max(0.0, named_at - begun_at - fault.limit_s)
    shown = f"{stdout.text}-- stderr\n{text}"
    return Outcome(
        fault.name, hosts, mpi, named_s, wrong_names(text[before:], right), missing, shown
    )


def _await_name(
    fault: Fault, hosts: int, process: subprocess.Popen[str], stderr: _Heard, limit: float
) -> float | None:
    patterns = fault.patterns(hosts)
    while True:
        has_ended = process.poll() is not None
        if has_ended:
            stderr.join()
        now = time.monotonic()
        if all(pattern.search(stderr.text) for pattern in patterns):
            return now
        if has_ended or now > limit + NAMED_S:
            return None
        time.sleep(PAUSE_S)


def _adder(stack: contextlib.ExitStack) -> Callable[[Callable[[], None]], None]:
    def add(does: Callable[[], None]) -> None:
        stack.callback(does)

    return add


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    end_tree(process)


def _process(script: Path, rank: int) -> int:
    """The rank's process, as it is seen here."""
    return next(_processes(script, rank))


def _processes(script: Path, rank: int) -> Iterator[int]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if words[-1:] == [str(script)] and len(words) == 2:
                environment = process.environ()
                if environment.get("RANK") == str(rank) and KEEPER in environment:
                    yield process.pid


def _no_cluster(*words: str | Path) -> str:
    raise AssertionError(f"{words}: there are no hosts")
