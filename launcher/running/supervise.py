"""Runs a job: starts mpirun, and again if it failed by chance before any rank had started. A loop
turns input from file descriptors and signals into events, and does what `course` decides. `result`
shows how the job went."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from hvdrun.agent import frames
from hvdrun.agent.signals import ENDS_JOB, PASSED_ON, heeded
from hvdrun.agent.silence import clock
from hvdrun.errors import LacksResource, OutputLost
from hvdrun.job import actions, events
from hvdrun.job.course import Course, Event, Supervision
from hvdrun.job.far_hosts import Pauses
from hvdrun.machine import notes
from hvdrun.machine.environment import LINK, for_launchers
from hvdrun.machine.own_files import open_file
from hvdrun.machine.processes import (
    die_with_parent,
    kill_descendants,
    kill_strays,
    remove_sessions,
    session_of,
    set_subreaper,
)
from hvdrun.machine.resources import temporary_path
from hvdrun.output.metrics_file import MetricsFile
from hvdrun.output.screen import Screen
from hvdrun.output.terminal import Terminal
from hvdrun.plan.command import Command
from hvdrun.running import result
from hvdrun.running.askers import FIGURES, METRICS, STACKS, Askers
from hvdrun.running.hosts import Hosts
from hvdrun.running.sources import NodeSignals, Source, Stdin

if TYPE_CHECKING:  # they are loaded for the first other host, and for --monitor, which needs rich
    from hvdrun.agent.host_connection import HostConnection
    from hvdrun.monitor.monitor import Monitor

ATTEMPTS = 3
# A turn of the loop waits no longer than this, so that hosts get signs of life.
TURN_S = 0.5
# What ranks print, and into which stream.
STREAMS = {frames.OUT: 1, frames.ERR: 2}


def supervise(
    command: Command,
    screen: Screen,
    supervision: Supervision,
    node_signals: NodeSignals | None = None,
    kept: dict[str, HostConnection] | None = None,
) -> int:
    """Runs the job and returns its exit code. kept: connections to hosts, for the first attempt.

    Raises LaunchError if hvdrun itself failed.
    """
    kept = kept or {}
    unwanted = kept.keys() - {share.host.name for share in command.shares}
    if unwanted:
        from hvdrun.agent.host_connection import leave

        leave([kept.pop(host) for host in unwanted])
    with _hosts_file(command):
        set_subreaper()
        if node_signals is not None:
            node_signals.begin()
        # All attempts share one waker, so that no signal between two of them is lost.
        # TSTP (Ctrl-Z) only makes a line: hosts would take a stopped launcher for dead.
        waker = frames.Waker([signal.SIGCHLD, signal.SIGTSTP, *heeded()])
        attempt = 1
        while True:
            is_last = attempt == ATTEMPTS
            supervision.report.attempt(attempt)
            job = Supervisor(command, screen, supervision, waker, is_last, node_signals, kept)
            try:
                return job.run()
            except StartedBadly:
                attempt += 1
                screen.output.say(
                    f"hvdrun: {command.starter} could not start one of its own threads, before any"
                    f" rank had started; trying again ({attempt} of {ATTEMPTS})"
                )


@contextlib.contextmanager
def _hosts_file(command: Command) -> Iterator[None]:
    """The file with the list of hosts is there, if the command reads one."""
    if command.hosts_file is None:
        yield
        return
    path, content = command.hosts_file
    try:
        try:
            with open(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(content)
        except OSError as error:
            raise LacksResource(
                f"the list of hosts can't be written to {path}: {error.strerror}; make room there,"
                " or set TMPDIR to another folder"
            ) from error
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


class StartedBadly(Exception):
    """mpirun failed by chance before any rank started; every process has ended."""


class Supervisor:
    """One attempt to run the job. Raises StartedBadly if it is not the last."""

    def __init__(
        self,
        command: Command,
        screen: Screen,
        supervision: Supervision,
        waker: frames.Waker,
        is_last: bool,
        node_signals: NodeSignals | None,
        kept: dict[str, HostConnection],
    ) -> None:
        """kept: preflight's connections, by host."""
        self.course = Course(command, time.monotonic(), supervision)
        self.command = command
        self.screen = screen
        self.waker = waker
        self.is_last = is_last
        self.node_signals = node_signals
        self.selector = selectors.DefaultSelector()
        self.secret = os.urandom(16).hex()
        self.results = os.environ.get(notes.RESULTS_FILE, "")
        self.request, self.cwd = supervision.request, supervision.cwd
        self.report = supervision.report
        self.metrics_file: MetricsFile | None = None
        if self.request.metrics_file:
            self.metrics_file = MetricsFile(self.request.metrics_file, self._metrics)
        self.monitor: Monitor | None = None
        self.mpirun: subprocess.Popen[bytes] | None = None
        self.kept = kept
        self.pauses = Pauses(clock())

    # ------------------------------------------------------------ the loop

    def run(self) -> int:
        """Returns the exit code."""
        terminal = Terminal()
        self._listen()
        try:
            self._start()
            if self.metrics_file is not None:
                self.metrics_file.begin()
            while not self.course.finished:
                self._turn()
        except BrokenPipeError:
            self._tell(events.ReaderLeft())
        finally:
            self._end_all()
        if self.course.may_start_again and not self.is_last:
            raise StartedBadly
        was_ended = self.course.signal is not None
        try:
            code = result.show(self.course, self.screen, self.report)
        finally:
            if self.metrics_file is not None:
                self.metrics_file.end()
                self._say_metrics_failure()
            result.finish_output(self.screen, was_ended, partial(self._is_interrupted, was_ended))
            terminal.restore()
        if code in (0, 128 + signal.SIGPIPE):
            self.screen.writer.check()
        return code

    def _listen(self) -> None:
        """All that can wake the loop, but for mpirun's output: keepers, hosts, questions about the
        job, signals, keys, and the end of what waits to be written."""
        if self.request.monitor:
            from hvdrun.monitor.monitor import Monitor

            self.monitor = Monitor(self.course, self.screen, self.selector, self._tell, os.environ)
        takes_keys = self.monitor is not None and self.monitor.takes_keys
        self.hosts = Hosts(
            self.command,
            self.secret,
            self.request.host_timeout_s,
            self.selector,
            Stdin(self.selector, is_taken=takes_keys),
            self.kept,
            self._deliver,
            self._tell,
        )
        self.askers = Askers(
            self.selector,
            {
                STACKS: lambda asker: self._tell(events.StacksAsked(asker)),
                METRICS: lambda asker: self._tell(events.MetricsAsked(asker)),
                FIGURES: lambda asker: self._tell(events.MetricsAsked(asker, as_json=True)),
            },
        )
        self.selector.register(self.waker.fd, selectors.EVENT_READ, self._woken)
        if (nodes := self.node_signals) is not None:
            self.selector.register(nodes.fd, selectors.EVENT_READ, partial(self._heard, nodes))
        writer = self.screen.writer
        self.selector.register(writer.awake, selectors.EVENT_READ, writer.heard)

    def _start(self) -> None:
        reader, writer = os.pipe()
        environment = {**self.command.environment, LINK: self.secret}
        # What mpirun and srun have they may send to other hosts, where everybody can read it.
        of_mpi = environment if self.command.sent is None else for_launchers(environment)
        self.mpirun, *self.connections = (
            subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=writer,
                stderr=writer,
                env=env,
                cwd=self.cwd,
                start_new_session=True,  # Ctrl-C is for hvdrun, which ends things in order
                preexec_fn=die_with_parent(signal.SIGTERM),
            )
            for argv, env in (
                (self.command.argv, of_mpi),
                *((argv, environment) for argv in self.command.connections),
            )
        )
        os.close(writer)
        self.mpirun_pipe = Source(
            reader,
            self.selector,
            lambda data: self._tell(events.MpirunSaid(data)),
            lambda: self._tell(events.MpirunOutputEnded()),
        )

    def _turn(self) -> None:
        ready = self.selector.select(self._timeout())
        self._notice_pause()  # before what happened meanwhile
        for key, _ in ready:
            key.data()
            # After each, because all of them together may take longer than a host waits.
            self.hosts.exchange_signs_of_life(self._notice_pause())
        self.hosts.exchange_signs_of_life(self._notice_pause())
        keepers = len(self.hosts.local_ranks.keepers)
        if keepers != self.course.keepers:
            self._tell(events.KeepersHere(keepers))
        if not self.pauses.catch_up_s(clock()):
            self._tell(events.TimePassed())
        self._say_metrics_failure()
        self.screen.output.tick()
        if self.monitor is not None:
            self.monitor.tick(time.monotonic())
        full = self.screen.writer.is_full()
        self.hosts.pause(full)
        self.mpirun_pipe.pause(full)

    def _timeout(self) -> float:
        waits = [TURN_S, self.screen.output.wait_s()]
        if self.monitor is not None:
            waits.append(self.monitor.wait_s(time.monotonic()))
        wake_at = self.course.wake_at()
        if wake_at is not None:
            waits.append(max(wake_at - time.monotonic(), self.pauses.catch_up_s(clock())))
        return max(0.0, min(wait for wait in waits if wait is not None))

    def _notice_pause(self) -> float:
        now = clock()
        if pause_s := self.pauses.look(now):
            self._tell(events.Paused(pause_s))
        return now

    def _end_all(self) -> None:
        if self.monitor is not None:
            self.monitor.end()
        self.askers.close()
        self.hosts.close()
        kill_descendants()
        sessions = set(self.hosts.local_ranks.sessions)
        if self.mpirun is not None:  # if it has failed at its start, its folder stays behind
            folder = temporary_path(self.command.environment)[1]
            sessions.add(session_of(folder, self.mpirun.pid))
        remove_sessions(sessions)

    def _metrics(self, is_running: bool) -> str:
        """Called by another thread."""
        now = time.monotonic() if is_running else None
        return self.course.measured.exposition({"hvdrun": os.getpid()}, now)

    def _say_metrics_failure(self) -> None:
        if self.metrics_file is not None and (line := self.metrics_file.take_failure()):
            self.screen.output.say(line)

    # ------------------------------------------------------------ events

    def _tell(self, event: Event) -> None:
        for action in self.course.on(time.monotonic(), event):
            self._do(action)

    def _deliver(self, kind: bytes, rank: int, payload: bytes, host: str = "") -> None:
        """A keeper has sent this; `frames.check` has looked at it."""
        if kind in STREAMS:
            self.screen.output.feed(rank, STREAMS[kind], payload)
        elif kind == frames.RESULT:
            self._keep_result(rank, payload)
        elif kind in events.BY_FRAME:
            self._tell(events.BY_FRAME[kind](rank, payload, host))
        if kind == frames.KEEPER_GONE and not self.hosts.local_ranks.keepers:
            kill_strays()

    def _keep_result(self, rank: int, part: bytes) -> None:
        """In a file in memory that hvdlite.run has given, which it reads at the end."""
        if self.results.isdigit():
            try:
                frames.write_all(int(self.results), notes.pack_result(rank, part))
            except OSError as error:
                raise OutputLost(
                    f"what rank {rank} returned can't be kept in memory: {error.strerror}; return "
                    "less, or write it to a file"
                ) from None

    def _woken(self) -> None:
        for number in self.waker.read():
            if number == signal.SIGTSTP:
                self._tell(events.ToStop())
            else:
                self._signalled(number)
        if self.mpirun is not None and self.course.mpirun.runs:
            code = self.mpirun.poll()
            if code is not None:
                self._tell(events.MpirunEnded(code))

    def _heard(self, nodes: NodeSignals) -> None:
        for number, node in nodes.read():
            self._signalled(number, node)

    def _signalled(self, number: int, node: int = 0) -> None:
        if number in ENDS_JOB:
            self._tell(events.Interrupted(number, node))
        elif number in PASSED_ON:
            self._tell(events.ToPassOn(number))

    def _is_interrupted(self, was_ended: bool) -> bool:
        """By a signal after the end of the job. Another node's may be what has ended it."""
        here = any(number in ENDS_JOB for number in self.waker.read())
        nodes = self.node_signals.read() if self.node_signals is not None else []
        there = any(number in ENDS_JOB for number, _ in nodes)
        return here or (there and not was_ended)

    # ------------------------------------------------------------ actions

    def _do(self, action: actions.Action) -> None:
        match action:
            case actions.Say(text):
                self.screen.output.say(text)
            case actions.EndAll(grace_s, first):
                self.screen.output.ending()
                self.hosts.end(grace_s, first)
            case actions.EndHosts(grace_s):
                self.hosts.end_others(grace_s)
            case actions.Release():
                self.hosts.release()
            case actions.PassOn(number, request):
                self.hosts.pass_on(number, request)
            case actions.Look(ranks, with_stack, with_box):
                self.hosts.look(ranks, with_stack, with_box)
            case actions.Answer(asker, text) if asker < 0 and self.monitor is not None:
                self.monitor.answered(text)
            case actions.Answer(asker, text):
                self.askers.answer(asker, text)
            case actions.HangUp(host):
                self.hosts.hang_up(host)
            case actions.SignalMpirun(number):
                with contextlib.suppress(OSError):
                    if self.mpirun is not None:
                        os.killpg(self.mpirun.pid, number)
            case actions.Finish():
                pass  # the loop itself asks `course.finished`
