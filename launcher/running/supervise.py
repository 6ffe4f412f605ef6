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
from functools import partial
from typing import TYPE_CHECKING

from hvdrun.agent.frames import (
    BLACK_BOX,
    BLACK_BOX_NOW,
    CLOSED,
    ERR,
    EXIT,
    KEEPER_GONE,
    LOOK,
    LOOKED,
    MPI_BEGUN,
    MPI_DONE,
    NOTE,
    OUT,
    RANK,
    RELEASE,
    RESULT,
    SIGNAL,
    SIGNALLED,
    WITH_STACK,
    WITH_STACK_AND_BOX,
    Waker,
    write_all,
)
from hvdrun.agent.local_ranks import LocalRanks
from hvdrun.agent.peers import listen
from hvdrun.agent.signals import ENDS_JOB, PASSED_ON
from hvdrun.agent.silence import clock
from hvdrun.errors import OutputLost
from hvdrun.job import verdict
from hvdrun.job.actions import (
    Action,
    Answer,
    EndAll,
    EndHosts,
    Finish,
    HangUp,
    Look,
    PassOn,
    Release,
    Say,
    SignalMpirun,
)
from hvdrun.job.course import Course
from hvdrun.job.events import (
    Event,
    HostConnected,
    Interrupted,
    KeeperGone,
    KeepersHere,
    MetricsAsked,
    MpirunEnded,
    MpirunOutputEnded,
    MpirunSaid,
    Paused,
    RankClosedFiles,
    RankEnded,
    RankInMpi,
    RankLeftMpi,
    RankLooked,
    RankRecorded,
    RankSaid,
    RankSignalled,
    RankStarted,
    ReaderLeft,
    StacksAsked,
    TimePassed,
    ToPassOn,
    ToStop,
)
from hvdrun.job.signs_of_life import Pauses
from hvdrun.job.supervision import Supervision
from hvdrun.machine import results
from hvdrun.machine.environment import (
    LINK,
    for_connections,
    for_launchers,
    pack,
    pack_host_variables,
)
from hvdrun.machine.processes import (
    die_with_parent,
    kill_descendants,
    kill_strays,
    remove_sessions,
    session_of,
)
from hvdrun.machine.resources import temporary_path
from hvdrun.output.metrics_file import MetricsFile
from hvdrun.output.screen import Screen
from hvdrun.output.terminal import Terminal
from hvdrun.plan.command import Command
from hvdrun.running.askers import FIGURES, METRICS, STACKS, Askers
from hvdrun.running.mpirun_pipe import Source
from hvdrun.running.node_signals import NodeSignals
from hvdrun.running.requeue import requeue
from hvdrun.running.stdin import Stdin

if TYPE_CHECKING:  # they are loaded for the first other host, and for --monitor, which needs rich
    from hvdrun.agent.host_connection import HostConnection
    from hvdrun.monitor.monitor import Monitor
    from hvdrun.running.host_link import HostLink

# After a signal, hvdrun takes at most this long to write its remaining output.
LAST_WORDS_S = 2.0
# A turn of the loop waits no longer than this, so that hosts get signs of life.
TURN_S = 0.5


class StartedBadly(Exception):
    """mpirun failed by chance before any rank started; every process has ended."""


class Supervisor:
    """One attempt to run the job. Raises StartedBadly if it is not the last."""

    def __init__(
        self,
        command: Command,
        screen: Screen,
        supervision: Supervision,
        waker: Waker,
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
        sent = command.sent
        self.variables = None if sent is None else pack(sent)
        self.results = os.environ.get(results.FILE, "")
        self.request, self.cwd = supervision.request, supervision.cwd
        self.metrics_file: MetricsFile | None = None
        if self.request.metrics_file:
            self.metrics_file = MetricsFile(self.request.metrics_file, self._metrics)
        self.monitor: Monitor | None = None
        self.links: set[HostLink] = set()
        self.kept = kept
        self.pauses = Pauses(clock())

    # ------------------------------------------------------------ the loop

    def run(self) -> int:
        listener = listen(self.secret)
        assert listener is not None, "nobody else knows the secret"
        terminal = Terminal()
        waker, writer, course = self.waker, self.screen.writer, self.course
        if self.request.monitor:
            from hvdrun.monitor.monitor import Monitor

            self.monitor = Monitor(course, self.screen, self.selector, self._tell, os.environ)
        takes_keys = self.monitor is not None and self.monitor.takes_keys
        self.stdin = Stdin(self.selector, is_taken=takes_keys)
        self.local_ranks = LocalRanks(
            listener,
            self.selector,
            self._deliver,
            self.stdin.for_local_rank,
            b"" if self.variables is None else pack_host_variables(self.command.environment),
            on_host=self._new_link,
            num_ranks=self.command.num_proc,
            variables=self.variables,
        )
        self.askers = Askers(
            self.selector,
            {
                STACKS: lambda asker: self._tell(StacksAsked(asker)),
                METRICS: lambda asker: self._tell(MetricsAsked(asker)),
                FIGURES: lambda asker: self._tell(MetricsAsked(asker, as_json=True)),
            },
        )
        self.selector.register(waker.fd, selectors.EVENT_READ, lambda: self._woken(waker.read()))
        if (nodes := self.node_signals) is not None:
            self.selector.register(nodes.fd, selectors.EVENT_READ, lambda: self._heard(nodes))
        self.selector.register(writer.awake, selectors.EVENT_READ, writer.heard)
        try:
            self._start()
            if self.metrics_file is not None:
                self.metrics_file.begin()
            while not course.finished:
                self._turn()
        except BrokenPipeError:
            self._tell(ReaderLeft())
        finally:
            if self.monitor is not None:
                self.monitor.end()
            self.askers.close()
            for link in list(self.links):
                link.close()
            while self.kept:  # which mpirun has not wanted
                self.kept.popitem()[1].kill()
            self.local_ranks.kill()
            kill_descendants()
            remove_sessions({*self.local_ranks.sessions, *self._own_session()})
        if course.may_start_again and not self.is_last:
            raise StartedBadly
        try:
            code = self._result()
        finally:
            self._end_metrics()
            self._last_words()
            terminal.restore()
        if code in (0, 128 + signal.SIGPIPE):
            writer.check()
        return code

    def _turn(self) -> None:
        ready = self.selector.select(self._timeout())
        self._notice_pause()  # before what happened meanwhile
        for key, _ in ready:
            key.data()
            # After each, because all of them together may take longer than a host waits.
            self._exchange_signs_of_life()
        self._exchange_signs_of_life()
        if len(self.local_ranks.keepers) != self.course.keepers:
            self._tell(KeepersHere(len(self.local_ranks.keepers)))
        if not self.pauses.catch_up_s(clock()):
            self._tell(TimePassed())
        self._say_metrics_failure()
        self.screen.output.tick()
        if self.monitor is not None:
            self.monitor.tick(time.monotonic())
        full = self.screen.writer.is_full()
        self.local_ranks.pause(full)
        self.mpirun_pipe.pause(full)
        for link in self.links:
            link.pause(full)

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
            self._tell(Paused(pause_s))
        return now

    def _exchange_signs_of_life(self) -> None:
        now = self._notice_pause()
        for link in [link for link in self.links if not link.tick(now)]:
            self.links.discard(link)
            link.close()
            self._tell(link.how_it_fell_silent())

    def _start(self) -> None:
        reader, writer = os.pipe()
        environment = {**self.command.environment, LINK: self.secret}
        # What mpirun and srun have they may send to other hosts, where everybody can read it.
        of_mpi = environment if self.variables is None else for_launchers(environment)
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
            lambda data: self._tell(MpirunSaid(data)),
            lambda: self._tell(MpirunOutputEnded()),
        )

    def _own_session(self) -> list[str]:
        """mpirun's session folder, which stays behind if mpirun fails at its start."""
        mpirun = getattr(self, "mpirun", None)
        return (
            [session_of(temporary_path(self.command.environment)[1], mpirun.pid)] if mpirun else []
        )

    def _result(self) -> int:
        output = self.screen.output
        found = verdict.reach(self.course, time.monotonic(), time.time(), output.tails)
        with contextlib.suppress(BrokenPipeError):
            output.finish(found.culprit)
        lines = found.lines
        if found.culprit is not None and output.recent.end_with(found.culprit, found.words):
            lines = found.brief
        output.report(found.lines, shown=lines)
        if found.exit_code and (kept := self._keep_operations()):
            output.say(kept)
        if self.course.summaries and (lost := self.screen.keep_metrics(self.course.figures())):
            output.say(lost)
        if found.requeues and self.course.requeue is not None:
            output.say(requeue(self.course.requeue))
        if found.error is not None:
            raise found.error
        return found.exit_code

    def _keep_operations(self) -> str:
        """The line about it, or "". After Ctrl-C or a signal like it hvdrun ends at once, and which
        operation came last is what the signal happened to find."""
        recorded = self.course.recorded
        is_wanted = self.screen.keeps_files and self.course.signal is None
        if not is_wanted or not (operations := recorded.rows()):
            return ""
        return self.screen.keep_operations(operations, recorded.summary())

    def _metrics(self, is_running: bool) -> str:
        """Called by another thread."""
        now = time.monotonic() if is_running else None
        return self.course.exposition({"hvdrun": os.getpid()}, now)

    def _say_metrics_failure(self) -> None:
        if self.metrics_file is not None and (line := self.metrics_file.take_failure()):
            self.screen.output.say(line)

    def _end_metrics(self) -> None:
        if self.metrics_file is not None:
            self.metrics_file.end()
            self._say_metrics_failure()

    def _last_words(self) -> None:
        """Waits until all output is written. After Ctrl-C or a signal like it, a reader that has
        stopped reading is not waited for."""
        writer = self.screen.writer
        was_ended = self.course.signal is not None
        until = time.monotonic() + LAST_WORDS_S if was_ended else float("inf")
        while not writer.drain(min(until, time.monotonic() + 0.1)):
            if time.monotonic() > until or self._is_interrupted(was_ended):
                return
        if lost := self.screen.lost():
            self.screen.output.say(lost)
            writer.drain(time.monotonic() + LAST_WORDS_S)

    def _is_interrupted(self, was_ended: bool) -> bool:
        """By a signal after the end of the job. Another node's may be what has ended it."""
        here = any(number in ENDS_JOB for number in self.waker.read())
        nodes = self.node_signals.read() if self.node_signals is not None else []
        there = any(number in ENDS_JOB for number, _ in nodes)
        return here or (there and not was_ended)

    # ------------------------------------------------------------ events

    def _tell(self, event: Event) -> None:
        for action in self.course.on(time.monotonic(), event):
            self._do(action)

    def _deliver(self, kind: bytes, rank: int, payload: bytes, host: str = "") -> None:
        if kind == OUT:
            self.screen.output.feed(rank, 1, payload)
        elif kind == ERR:
            self.screen.output.feed(rank, 2, payload)
        elif kind == RESULT:
            self._keep_result(rank, payload)
        elif kind == RANK:
            self._tell(RankStarted(rank, host))
        elif kind == MPI_BEGUN:
            self._tell(RankInMpi(rank))
        elif kind == MPI_DONE:
            self._tell(RankLeftMpi(rank))
        elif kind == NOTE:
            self._tell(RankSaid(rank, payload[:1], payload[1:]))
        elif kind == LOOKED:
            self._tell(RankLooked(rank, payload))
        elif kind in (BLACK_BOX, BLACK_BOX_NOW):
            self._tell(RankRecorded(rank, payload, is_running=kind == BLACK_BOX_NOW))
        elif kind == CLOSED:
            self._tell(RankClosedFiles(rank, int(payload.split()[1]) / 1e9))
        elif kind == EXIT:
            how, _, at_ns = payload.decode().rpartition(" ")
            self._tell(RankEnded(rank, how, int(at_ns) / 1e9))
        elif kind == SIGNALLED:
            _, request, answer = payload.decode().split()
            self._tell(RankSignalled(rank, int(request), answer))
        elif kind == KEEPER_GONE:
            self._tell(KeeperGone(rank, payload.decode(errors="replace")))
            if not self.local_ranks.keepers:
                kill_strays()

    def _keep_result(self, rank: int, part: bytes) -> None:
        """In a file in memory that hvdlite.run has given, which it reads at the end."""
        if self.results.isdigit():
            try:
                write_all(int(self.results), results.pack(rank, part))
            except OSError as error:
                raise OutputLost(
                    f"what rank {rank} returned can't be kept in memory: {error.strerror}; return "
                    "less, or write it to a file"
                ) from None

    def _new_link(self, asker: socket.socket, wish: list[bytes]) -> None:
        """The role ssh wants MPI's daemon on a host."""
        from hvdrun.running.host_link import HostLink

        # Not with options of the user's for ssh.
        kept = None if wish[1] else self.kept.pop(os.fsdecode(wish[0]), None)
        if kept is not None:
            kept.read_all()  # whether it has ended
        link = HostLink(
            asker,
            wish,
            None if kept is None or kept.closed else kept,
            for_connections(self.command.environment),
            self.secret,
            self.selector,
            partial(self._deliver, host=wish[0].decode(errors="replace")),
            self._tell,
            self.stdin.wanted_by,
            self._link_closed,
            self.request.host_timeout_s,
            self.command.num_proc,
            self.variables,
        )
        self.links.add(link)
        self._tell(HostConnected(link.host))
        link.begin()

    def _link_closed(self, link: HostLink) -> None:
        self.links.discard(link)
        self._tell(link.how_it_ended())

    def _woken(self, numbers: bytes) -> None:
        for number in numbers:
            if number == signal.SIGTSTP:
                self._tell(ToStop())
            else:
                self._signalled(number)
        if self.course.mpirun.runs and (code := self.mpirun.poll()) is not None:
            self._tell(MpirunEnded(code))

    def _heard(self, nodes: NodeSignals) -> None:
        for number, node in nodes.read():
            self._signalled(number, node)

    def _signalled(self, number: int, node: int = 0) -> None:
        if number in ENDS_JOB:
            self._tell(Interrupted(number, node))
        elif number in PASSED_ON:
            self._tell(ToPassOn(number))

    # ------------------------------------------------------------ actions

    def _do(self, action: Action) -> None:
        match action:
            case Say(text):
                self.screen.output.say(text)
            case EndAll(grace_s, first):
                self.screen.output.ending()
                self.local_ranks.end(grace_s, first)
                for link in self.links:
                    link.end(grace_s, first)
            case EndHosts(grace_s):
                for link in self.links:
                    link.end(grace_s)
            case Release():
                self.local_ranks.release()
                self._send_hosts(RELEASE)
            case PassOn(number, request):
                payload = b"%d %d" % (number, request)
                self.local_ranks.pass_on(payload)
                self._send_hosts(SIGNAL, payload)
            case Look(ranks, with_stack, with_box):
                what = WITH_STACK_AND_BOX if with_box else WITH_STACK
                self._look(ranks, what if with_stack else b"")
            case Answer(asker, text) if asker < 0 and self.monitor is not None:
                self.monitor.answered(text)
            case Answer(asker, text):
                self.askers.answer(asker, text)
            case HangUp(host):
                for link in self.links:
                    if link.host == host:
                        link.hang_up()
            case SignalMpirun(number):
                with contextlib.suppress(OSError):
                    os.killpg(self.mpirun.pid, number)
            case Finish():
                pass  # the loop itself asks `course.finished`

    def _look(self, ranks: tuple[int, ...], what: bytes) -> None:
        """Every supervisor is asked, as two names of hosts may mean one machine: the one that has
        the rank answers."""
        for rank in ranks:
            self.local_ranks.look(rank, what)
            self._send_hosts(LOOK, b"%d %s" % (rank, what))

    def _send_hosts(self, kind: bytes, payload: bytes = b"") -> None:
        for link in self.links:
            if link.talking:
                link.send(kind, payload)
