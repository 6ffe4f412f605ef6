"""Starts a job of the soak on the rig, does its fault, and waits until it has ended."""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import shutil
import signal
import subprocess
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

from tests.harness.worlds import ROOT, end_tree, python_of
from tests.properties.strategies import programs
from tests.rig.conftest import Rig
from tests.soak.drawing import TINY, Job
from tests.soak.leftovers import new_things, things

PORT = 29810
START_LIMIT_S = 240.0
END_LIMIT_S = 240.0
GONE_LIMIT_S = 45.0
LOOK_EVERY_S = 0.05
SERVERS = ("server1", "server2", "server3")


@dataclass
class Played:
    """What came of a job.

    codes: of each hvdrun, node 0's first. errors: what that one said on stderr, and on stdout.
    rounds: by rank, how many rounds' first operations it has ended. late: what was waited for in
    vain, with the stacks of all ranks.
    """

    codes: list[int]
    out: str = ""
    errors: str = ""
    others: str = ""
    rounds: dict[int, int] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    late: str = ""
    seconds: float = 0.0


class TooLate(Exception):
    """Something did not happen in time."""


def programs_of(job: Job) -> list[Any]:
    """Random programs of collectives, with an oracle for each (tests/properties)."""
    drawn: list[Any] = []
    if not job.programs:
        return drawn
    name = f"{job.seed} {job.number}"

    @settings(
        max_examples=job.programs,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @seeded(zlib.crc32(name.encode()))
    @given(programs(job.workers, large=not TINY.items() <= dict(job.knobs).items()))
    def draw(program: Any) -> None:
        drawn.append(program)

    draw()
    return drawn


class Running:
    """A job that runs. `kept`: a folder for all that it prints."""

    def __init__(self, rig: Rig, job: Job, kept: Path) -> None:
        self.rig = rig
        self.job = job
        self.folder = rig.share / f"job-{job.number}"
        self.kept = kept
        self.hosts = SERVERS[: len(job.layout)]
        self.started: list[subprocess.Popen[bytes]] = []

    def play(self) -> Played:
        before = things(self.rig, SERVERS)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self.kept.mkdir(parents=True, exist_ok=True)
        (self.folder / "job").write_bytes(pickle.dumps((self.job, programs_of(self.job))))
        begin = time.monotonic()
        played = Played([])
        try:
            self._start()
            if self.job.waits_for_end:
                self._until_round(self.job.fault.at_round)
                time.sleep(self.job.fault.wait_s)
                self._act()
            self._until_ended()
        except TooLate as late:
            played.late = f"{late}\n{self._stacks()}"
        finally:
            for process in self.started:
                end_tree(process)
        played.seconds = time.monotonic() - begin
        played.codes = [process.returncode for process in self.started]
        played.left = self._processes_left()
        self.rig.restore()
        played.left += new_things(before, things(self.rig, SERVERS))
        played.rounds = self._rounds()
        played.out = self._text("0.out")
        played.errors = self._text("0.err")
        played.others = "".join(self._text(f"{node}.err") for node in range(1, len(played.codes)))
        if self.job.timeline and (self.folder / "timeline").exists():
            shutil.copy(self.folder / "timeline", self.kept)
        shutil.rmtree(self.folder)
        return played

    # ---- starting ----

    def _start(self) -> None:
        job, python = self.job, python_of(self.job.mpi)
        hvdrun = python.with_name("hvdrun")
        words: list[str | Path] = [*job.options]
        words += [word for name, value in job.knobs for word in ("-x", f"{name}={value}")]
        words += ["--servers", str(job.servers)] if job.servers else []
        words += ["--timeline-filename", self.folder / "timeline"] if job.timeline else []
        words += [python, "-m", "tests.soak.rank", self.folder]
        if job.start == "ssh":
            ranks = zip(self.hosts, job.layout, strict=True)
            where = ",".join(f"{host}:{count}" for host, count in ranks)
            self._start_on("server1", hvdrun, "-H", where, *words)
            return
        secret = self.folder / "secret"
        secret.write_text(secrets.token_hex(32))
        secret.chmod(0o600)
        meet = ["-np", str(job.size), "--rendezvous", f"server1:{PORT}", "--nodes"]
        meet += [str(len(self.hosts)), "--rendezvous-secret-file", str(secret), "--node-rank"]
        for node, host in enumerate(self.hosts):
            self._start_on(host, hvdrun, *meet, str(node), *words)

    def _start_on(self, host: str, *command: str | Path) -> None:
        node = len(self.started)
        with (
            open(self.kept / f"{node}.out", "wb") as out,
            open(self.kept / f"{node}.err", "wb") as errors,
        ):
            process = subprocess.Popen(
                self.rig.inside(host, *command),
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                start_new_session=True,
            )
        self.started.append(process)

    # ---- waiting ----

    def _wait(self, is_so: Callable[[], bool], limit_s: float, what: str) -> None:
        deadline = time.monotonic() + limit_s
        while not is_so():
            if time.monotonic() > deadline:
                raise TooLate(f"{what} not within {limit_s:g} s")
            time.sleep(LOOK_EVERY_S)

    def _until_round(self, number: int) -> None:
        def is_there() -> bool:
            rounds = self._rounds().values()
            has_ended = any(process.poll() is not None for process in self.started)
            return has_ended or (len(rounds) >= self.job.workers and min(rounds) > number)

        self._wait(is_there, START_LIMIT_S, f"round {number} was reached")

    def _until_ended(self) -> None:
        def have_ended() -> bool:
            return all(process.poll() is not None for process in self.started)

        self._wait(have_ended, END_LIMIT_S, "the job ended")

    def _rounds(self) -> dict[int, int]:
        found = {}
        for path in self.folder.glob("position.*"):
            if text := path.read_text():
                found[int(path.suffix[1:])] = int(text)
        return {rank: number for rank, number in found.items() if number}

    def _processes_left(self) -> list[str]:
        """What still runs after some time. It is ended, so that the next job is not blamed."""
        deadline = time.monotonic() + GONE_LIMIT_S
        while (left := self.rig.processes()) and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)
        for _, process in self.rig.members() if left else ():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if words and "_host" not in words and process.name() not in self.rig.services:
                    process.kill()
        return [f"{host}: process {words}" for host, all_ in left.items() for words in all_]

    def _stacks(self) -> str:
        """Where all ranks are."""
        texts = []
        for host, process in self._matching(is_hvdrun):
            python = python_of(self.job.mpi)
            numbers = Path(f"/proc/{process.pid}/status").read_text()
            inner = numbers.partition("NSpid:")[2].split("\n")[0].split()[-1]
            command = self.rig.inside(host, python.with_name("hvdrun"), "--stacks", inner)
            with contextlib.suppress(subprocess.TimeoutExpired):
                done = subprocess.run(command, capture_output=True, text=True, timeout=40)
                texts += [done.stdout, done.stderr]
        return "\n".join([*texts, *map(str, self.rig.processes().items())])

    def _text(self, name: str) -> str:
        return (self.kept / name).read_text(errors="replace")

    # ---- faults ----

    def _matching(self, holds: Callable[[list[str]], bool]) -> Iterator[tuple[str, psutil.Process]]:
        for host, process in self.rig.members():
            with contextlib.suppress(psutil.Error):
                if holds(process.cmdline()):
                    yield host, process

    def _one(self, holds: Callable[[list[str]], bool], host: str) -> psutil.Process:
        found = [process for at, process in self._matching(holds) if at == host]
        # The parent of others like it comes first.
        return min(found, key=lambda process: process.create_time())

    def _victim(self) -> psutil.Process:
        rank = str(self.job.fault.victim)
        for _, process in self._matching(is_rank):
            with contextlib.suppress(psutil.Error):
                if process.environ().get("RANK") == rank:
                    return process
        raise TooLate(f"no process of rank {rank} was found")

    def _act(self) -> None:
        fault = self.job.fault
        host = SERVERS[fault.host]
        try:
            match fault.kind:
                case "SIGKILL":
                    self._victim().kill()
                case "SIGSEGV":
                    self._victim().send_signal(signal.SIGSEGV)
                case "stall for ever":
                    self._victim().suspend()
                case "pause" | "stall":
                    self._pause(self._victim())
                case "keeper killed":
                    self._victim().parent().kill()
                case "Ctrl-C":
                    self._one(is_hvdrun, "server1").send_signal(signal.SIGINT)
                case "TERM":
                    self._one(is_hvdrun, "server1").terminate()
                case "hvdrun killed":
                    self._one(is_hvdrun, "server1").kill()
                case "hvdrun paused":
                    self._pause(self._one(is_hvdrun, "server1"))
                case "agent killed":
                    self._one(is_host_agent, host).kill()
                case "link down":
                    self.rig("cut", host)
                    time.sleep(fault.for_s)
                    self.rig("heal", host)
                case "link cut":
                    self.rig("cut", host)
                case _:
                    raise ValueError(fault.kind)
        except psutil.NoSuchProcess:
            raise TooLate(f"the job had ended before its fault, {fault.kind}") from None
        if fault.for_s:
            (self.folder / "go").touch()

    def _pause(self, process: psutil.Process) -> None:
        process.suspend()
        time.sleep(self.job.fault.for_s)
        process.resume()


def is_rank(words: list[str]) -> bool:
    return words[1:3] == ["-m", "tests.soak.rank"]


def is_hvdrun(words: list[str]) -> bool:
    return len(words) > 1 and words[1].endswith("bin/hvdrun")


def is_host_agent(words: list[str]) -> bool:
    return "host" in words and any(word.endswith("agent.py") for word in words)
