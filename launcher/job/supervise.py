"""Runs one attempt at a job: a loop that turns input from file descriptors and signals into events,
and does what `course` decides. `verdict` decides how the job went."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import time

from hvdrun.agent.frames import (
    ERR,
    EXIT,
    KEEPER_GONE,
    MPI_BEGUN,
    MPI_DONE,
    OUT,
    RANK,
    Waker,
)
from hvdrun.agent.local_ranks import LocalRanks
from hvdrun.agent.peers import listen
from hvdrun.job import verdict
from hvdrun.job.actions import Action, EndAll, EndHosts, Finish, HangUp, Say, SignalMpirun
from hvdrun.job.course import Course
from hvdrun.job.events import (
    Event,
    HostConnected,
    HostSilent,
    Interrupted,
    KeeperGone,
    KeepersHere,
    MpirunEnded,
    MpirunOutputEnded,
    MpirunSaid,
    RankEnded,
    RankInMpi,
    RankLeftMpi,
    RankStarted,
    ReaderLeft,
    TimePassed,
)
from hvdrun.job.host_link import HostLink
from hvdrun.job.lacking import temporary_folder
from hvdrun.job.mpirun_output import Source
from hvdrun.job.stdin import Stdin
from hvdrun.machine.environment import LINK
from hvdrun.machine.processes import (
    die_with_parent,
    kill_descendants,
    kill_strays,
    remove_sessions,
    session_of,
)
from hvdrun.output.screen import Screen
from hvdrun.output.terminal import Terminal
from hvdrun.plan.command import Command

# TSTP (Ctrl-Z) is caught and ignored: hosts would take a stopped launcher for dead.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# After a signal, hvdrun takes at most this long to write its remaining output.
LAST_WORDS_S = 2.0
# A turn of the loop waits no longer than this, so that hosts get signs of life.
TURN_S = 0.5


class StartedBadly(Exception):
    """mpirun failed by chance before any rank started; every process has ended."""


def heeded() -> list[int]:
    """The signals that end a job. Under nohup, HUP (the terminal was closed) is not one of them."""
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in SIGNALS if not (nohup and number == signal.SIGHUP)]


class Supervisor:
    """One attempt to run the job. Raises StartedBadly if it is not the last."""

    def __init__(
        self,
        command: Command,
        cwd: str,
        screen: Screen,
        start_timeout_s: float,
        verbose: bool,
        waker: Waker,
        is_last: bool,
    ) -> None:
        self.course = Course(command, time.monotonic(), start_timeout_s, verbose)
        self.command = command
        self.cwd = cwd
        self.screen = screen
        self.waker = waker
        self.is_last = is_last
        self.selector = selectors.DefaultSelector()
        self.secret = os.urandom(16).hex()
        self.links: set[HostLink] = set()

    # ------------------------------------------------------------ the loop

    def run(self) -> int:
        listener = listen(self.secret)
        assert listener is not None, "nobody else knows the secret"
        terminal = Terminal()
        waker, writer, course = self.waker, self.screen.writer, self.course
        self.stdin = Stdin(self.selector)
        self.local_ranks = LocalRanks(
            listener,
            self.selector,
            self._deliver,
            self.stdin.for_local_rank,
            on_host=self._new_link,
        )
        self.selector.register(waker.fd, selectors.EVENT_READ, lambda: self._woken(waker.read()))
        self.selector.register(writer.awake, selectors.EVENT_READ, writer.heard)
        try:
            self._start()
            while not course.finished:
                self._turn()
        except BrokenPipeError:
            self._tell(ReaderLeft())
        finally:
            for link in list(self.links):
                link.close()
            self.local_ranks.kill()
            kill_descendants()
            remove_sessions({*self.local_ranks.sessions, *self._own_session()})
        if course.may_start_again and not self.is_last:
            raise StartedBadly
        try:
            code = self._result()
        finally:
            self._last_words()
            terminal.restore()
        if code in (0, 128 + signal.SIGPIPE):
            writer.check()
        return code

    def _turn(self) -> None:
        for key, _ in self.selector.select(self._timeout()):
            key.data()
            # After each, because all of them together may take longer than a host waits.
            self._exchange_signs_of_life()
        self._exchange_signs_of_life()
        if len(self.local_ranks.keepers) != self.course.keepers:
            self._tell(KeepersHere(len(self.local_ranks.keepers)))
        self._tell(TimePassed())
        self.screen.output.tick()
        full = self.screen.writer.is_full()
        self.local_ranks.pause(full)
        self.mpirun_pipe.pause(full)
        for link in self.links:
            link.pause(full)

    def _timeout(self) -> float:
        waits = [TURN_S, self.screen.output.wait_s()]
        wake_at = self.course.wake_at()
        if wake_at is not None:
            waits.append(wake_at - time.monotonic())
        return max(0.0, min(wait for wait in waits if wait is not None))

    def _exchange_signs_of_life(self) -> None:
        now = time.monotonic()
        for link in [link for link in self.links if not link.tick(now)]:
            self.links.discard(link)
            link.close()
            self._tell(HostSilent(link.host))

    def _start(self) -> None:
        reader, writer = os.pipe()
        self.mpirun, *self.connections = (
            subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=writer,
                stderr=writer,
                env={**self.command.environment, LINK: self.secret},
                cwd=self.cwd,
                start_new_session=True,  # Ctrl-C is for hvdrun, which ends things in order
                preexec_fn=die_with_parent(signal.SIGTERM),
            )
            for argv in (self.command.argv, *self.command.connections)
        )
        os.close(writer)
        self.mpirun_pipe = Source(
            reader,
            self.selector,
            lambda data: self._tell(MpirunSaid(data)),
            lambda: self._tell(MpirunOutputEnded()),
        )

    def _own_session(self) -> list[str]:
        """mpirun's session folder, which stays behind if mpirun fails at its start."""
        mpirun = getattr(self, "mpirun", None)
        return (
            [session_of(temporary_folder(self.command.environment)[1], mpirun.pid)]
            if mpirun
            else []
        )

    def _result(self) -> int:
        output = self.screen.output
        with contextlib.suppress(BrokenPipeError):
            output.finish()
        found = verdict.reach(self.course, time.monotonic(), time.time(), output.tails)
        for line in found.lines:
            output.say(line)
        if found.error is not None:
            raise found.error
        return found.exit_code

    def _last_words(self) -> None:
        """Waits until all output is written. After Ctrl-C or a signal like it, a reader that has
        stopped reading is not waited for."""
        writer = self.screen.writer
        was_ended = self.course.signal is not None
        until = time.monotonic() + LAST_WORDS_S if was_ended else float("inf")
        while not writer.drain(min(until, time.monotonic() + 0.1)):
            if time.monotonic() > until or any(n in SIGNALS for n in self.waker.read()):
                return
        if lost := self.screen.lost():
            self.screen.output.say(lost)
            writer.drain(time.monotonic() + LAST_WORDS_S)

    # ------------------------------------------------------------ events

    def _tell(self, event: Event) -> None:
        for action in self.course.on(time.monotonic(), event):
            self._do(action)

    def _deliver(self, kind: bytes, rank: int, payload: bytes) -> None:
        if kind == OUT:
            self.screen.output.feed(rank, 1, payload)
        elif kind == ERR:
            self.screen.output.feed(rank, 2, payload)
        elif kind == RANK:
            self._tell(RankStarted(rank))
        elif kind == MPI_BEGUN:
            self._tell(RankInMpi(rank))
        elif kind == MPI_DONE:
            self._tell(RankLeftMpi(rank))
        elif kind == EXIT:
            how, _, at_ns = payload.decode().rpartition(" ")
            self._tell(RankEnded(rank, how, int(at_ns) / 1e9))
        elif kind == KEEPER_GONE:
            self._tell(KeeperGone(rank))
            if not self.local_ranks.keepers:
                kill_strays()

    def _new_link(self, sock: socket.socket, host: str, stderr: int) -> None:
        link = HostLink(
            host,
            sock,
            stderr,
            self.secret,
            self.selector,
            self._deliver,
            self._tell,
            self.stdin.wanted_by,
            self._link_closed,
        )
        self.links.add(link)
        self._tell(HostConnected(host))

    def _link_closed(self, link: HostLink) -> None:
        self.links.discard(link)
        self._tell(link.how_it_ended())

    def _woken(self, numbers: bytes) -> None:
        for number in numbers:
            if number in SIGNALS:
                self._tell(Interrupted(number))
        if self.course.mpirun.runs and (code := self.mpirun.poll()) is not None:
            self._tell(MpirunEnded(code))

    # ------------------------------------------------------------ actions

    def _do(self, action: Action) -> None:
        match action:
            case Say(text):
                self.screen.output.say(text)
            case EndAll(grace_s):
                self.screen.output.ending()
                self.local_ranks.end(grace_s)
                self._end_hosts(grace_s)
            case EndHosts(grace_s):
                self._end_hosts(grace_s)
            case HangUp(host):
                for link in self.links:
                    if link.host == host:
                        link.hang_up()
            case SignalMpirun(number):
                with contextlib.suppress(OSError):
                    os.killpg(self.mpirun.pid, number)
            case Finish():
                pass  # the loop itself asks `course.finished`

    def _end_hosts(self, grace_s: float) -> None:
        for link in self.links:
            link.end(grace_s)
