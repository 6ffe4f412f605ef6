"""Runs mpirun, looks after every rank on every host, and says how it went.

A loop over events: what the ranks' keepers and the other hosts report (see `agent`), what mpirun
says and how it ends, and signals. With the first failure that arrives everything is being ended:
TERM, a grace, KILL. The first that happened decides the report and the exit code: when a rank dies,
others may fail of that before its host's words are here.
"""

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
    GRACE_S,
    KEEPER_GONE,
    MPI_BEGUN,
    MPI_DONE,
    OUT,
    RANK,
    SILENT_GRACE_S,
    Waker,
)
from hvdrun.agent.local_ranks import LocalRanks
from hvdrun.agent.peers import listen
from hvdrun.errors import LaunchError, MpirunFailed
from hvdrun.job.failure_report import (
    Failure,
    aborted,
    daemon_failed,
    first_failure,
    had_left,
    held_by_another,
    host_lost,
    host_without_words,
    interrupted,
    last_lines,
    left_early,
    left_improperly,
    lost_a_peer,
    missing_program,
    not_started,
    rank_failed,
    run_on,
    unreachable,
)
from hvdrun.job.host_link import HostLink
from hvdrun.job.mpirun_output import Noise, Source
from hvdrun.job.stdin import Stdin
from hvdrun.machine.environment import LINK
from hvdrun.machine.processes import (
    die_with_parent,
    kill_descendants,
    kill_strays,
    remove_sessions,
)
from hvdrun.output.screen import Screen
from hvdrun.output.terminal import Terminal
from hvdrun.plan.command import Command

# TSTP (Ctrl-Z) is heard and not obeyed: a launcher that stands still counts as dead.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# mpirun's own words wait so long before they are shown: a rank's failure makes them noise.
NOISE_DELAY_S = 0.5
# After a rank has left without MPI_Finalize: how long the others may take to leave, too.
LEAVE_S = 3.0
# After a rank has ended well, and others have not: when that is said.
RUN_ON_S = 60.0
# After a signal: how long what is still to be shown may take.
LAST_WORDS_S = 2.0
# How long mpirun may take to end after all ranks have ended well.
CLOSING_S = 10.0
# How long it may take after a failure, once there are no ranks any more.
MPIRUN_PATIENCE_S = 0.5
# After mpirun's end: how long keepers and hosts may take to say how their ranks ended.
REPORTS_S = 2.0


class StartedBadly(Exception):
    """mpirun failed by ill luck, and no rank was there; all is ended and cleared away."""


def heeded() -> list[int]:
    """Under nohup the end of the terminal is none of ours."""
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in SIGNALS if not (nohup and number == signal.SIGHUP)]


class Supervisor:
    """Of one attempt to run the job; StartedBadly if it is not the last."""

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
        self.command = command
        self.waker = waker
        self.is_last = is_last
        self.cwd = cwd
        self.screen = screen
        self.output = screen.output
        self.writer = screen.writer
        self.start_timeout_s = start_timeout_s
        self.verbose = verbose
        self.selector = selectors.DefaultSelector()
        self.secret = os.urandom(16).hex()
        self.links: set[HostLink] = set()
        self.noise = Noise()
        self.endings: dict[int, str] = {}  # rank → how it ended
        self.well: dict[int, float] = {}  # rank → when it ended with 0
        self.in_mpi: set[int] = set()  # between MPI_Init and MPI_Finalize, where that is seen
        self.done: set[int] = set()  # after MPI_Finalize
        self.run_on_said = False
        self.started: set[int] = set()
        self.failures: list[Failure] = []  # of ranks that were not ended by us
        self.late: list[Failure] = []  # as long as there is no other
        self.error: LaunchError | None = None
        self.signal: int | None = None  # that hvdrun was ended with
        self.begin = time.monotonic()
        self.kill_at: float | None = None  # set once everything is being ended
        self.mpirun_ended_at: float | None = None
        self.alone_since: float | None = None  # when nothing but mpirun was left to end
        self.closing_at: float | None = None  # all ranks have ended well

    # ------------------------------------------------------------ the loop

    def run(self) -> int:
        listener = listen(self.secret)
        assert listener is not None, "nobody else knows the secret"
        terminal = Terminal()
        waker = self.waker
        self.stdin = Stdin(self.selector)
        self.local_ranks = LocalRanks(
            listener,
            self.selector,
            self._deliver,
            self.stdin.for_local_rank,
            on_host=self._new_link,
        )
        self.selector.register(waker.fd, selectors.EVENT_READ, lambda: self._woken(waker.read()))
        self.selector.register(self.writer.awake, selectors.EVENT_READ, self.writer.heard)
        try:
            self._start()
            while not self._over():
                self._turn()
        except BrokenPipeError:
            # Whoever read our output is gone, as in `hvdrun … | head`, or the disk is full.
            self.signal = self.signal or signal.SIGPIPE
        finally:
            for link in list(self.links):
                link.close()
            self.local_ranks.kill()
            kill_descendants()
            remove_sessions(self.local_ranks.sessions)
        if not (self.is_last or self.started or self.signal) and self.noise.is_of_ill_luck():
            raise StartedBadly
        try:
            code = self._result()
        finally:
            self._last_words()
            terminal.restore()
        if code in (0, 128 + signal.SIGPIPE):
            self.writer.check()
        return code

    def _turn(self) -> None:
        for key, _ in self.selector.select(self._timeout()):
            key.data()
            # After each, as all of them together may take longer than a host waits for us.
            self._exchange_signs_of_life(time.monotonic())
        self._tick(time.monotonic())
        self.output.tick()
        full = self.writer.is_full()
        self.local_ranks.pause(full)
        self.said_by_mpirun.pause(full)
        for link in self.links:
            link.pause(full)

    def _last_words(self) -> None:
        """Waits until all is written. A reader that stands still is not waited for against the
        user's will."""
        until = float("inf") if self.signal is None else time.monotonic() + LAST_WORDS_S
        while not self.writer.drain(min(until, time.monotonic() + 0.1)):
            if time.monotonic() > until or any(n in SIGNALS for n in self.waker.read()):
                return
        if lost := self.screen.lost():
            self.output.say(lost)
            self.writer.drain(time.monotonic() + LAST_WORDS_S)

    def _over(self) -> bool:
        if self.kill_at is not None and time.monotonic() > self.kill_at + 2:
            return True  # what is left is killed without asking
        if self.mpirun_ended_at is None or self.said_by_mpirun.is_open:
            return False
        return not self.links and not self.local_ranks.keepers

    def _timeout(self) -> float:
        longest = 0.1 if self.kill_at is not None or self.noise.lines else 0.5
        output_s = self.output.wait_s()
        return longest if output_s is None else min(longest, output_s)

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
        self.said_by_mpirun = Source(reader, self.selector, self.noise)

    # ------------------------------------------------------------ events

    def _deliver(self, kind: bytes, rank: int, payload: bytes) -> None:
        if kind == OUT:
            self.output.feed(rank, 1, payload)
        elif kind == ERR:
            self.output.feed(rank, 2, payload)
        elif kind == RANK:
            self.started.add(rank)
        elif kind == MPI_BEGUN:
            self.in_mpi.add(rank)
        elif kind == MPI_DONE:
            self.in_mpi.discard(rank)
            self.done.add(rank)
        elif kind == EXIT:
            how, _, at_ns = payload.decode().rpartition(" ")
            self._rank_ended(rank, how, int(at_ns) / 1e9)
        elif kind == KEEPER_GONE:
            if rank not in self.endings:
                self._rank_ended(rank, "signal 9", time.monotonic())
            if not self.local_ranks.keepers:
                kill_strays()

    def _rank_ended(self, rank: int, ended: str, at: float) -> None:
        late = ended.startswith("late ")
        ended = ended.removeprefix("late ")
        self.endings[rank] = ended
        if ended == "code 0":
            self.well[rank] = at
            if len(self.well) == self.command.num_proc:
                self.closing_at = time.monotonic() + CLOSING_S
                if self.in_mpi:  # they are held, so that MPI does not end the others
                    self._end(0)
        elif ended.startswith("missing "):
            if not self._ending():
                self.error = missing_program(
                    self.command.program, rank, self.command.host_of(rank), int(ended.split()[1])
                )
                self._end(GRACE_S)
        elif not ended.startswith("asked "):
            host = self.command.host_of(rank)
            ago_s = time.monotonic() - at
            failure = Failure(rank, host, ended, at - self.begin, late, time.time() - ago_s)
            # What fails after hvdrun itself has ended the job is no failure of a rank.
            if self.failures or (not late and not self._ending()):
                self.failures += [*self.late, failure]
                self.late.clear()
            elif late:
                self.late.append(failure)
            if self.failures and not self._ending():
                self._end(GRACE_S)

    def _new_link(self, sock: socket.socket, host: str, stderr: int) -> None:
        link = HostLink(
            host,
            sock,
            stderr,
            self.secret,
            self.selector,
            self._deliver,
            lambda data: self.noise.feed(data, time.monotonic()),
            self.stdin.wanted_by,
            self._link_closed,
        )
        self.links.add(link)
        if self._ending():
            link.hang_up()

    def _link_closed(self, link: HostLink) -> None:
        self.links.discard(link)
        if self._ending():
            return
        if link.refused:
            self.error = held_by_another(link.host, link.refused)
        elif link.daemon_status is not None:
            if link.daemon_status == 0 or self.started & set(self.command.ranks_of(link.host)):
                return  # mpirun says the rest
            self.error = daemon_failed(link.host, link.daemon_status, link.daemon_said)
        elif not link.talking:
            self.error = unreachable(link.host, link.errors, self.command.python)
        else:
            self.error = host_lost(link.host, "the connection to it has ended", link.errors)
        self._end(GRACE_S)

    def _woken(self, numbers: bytes) -> None:
        for number in numbers:
            if number in SIGNALS:
                # The second time nobody waits for a grace.
                again = self.signal is not None
                self.signal = self.signal or number
                self.output.say(interrupted(number, self.command.num_proc, again))
                self._end(0 if again else GRACE_S)
        if self.mpirun_ended_at is None and self.mpirun.poll() is not None:
            self.mpirun_ended_at = time.monotonic()
            for link in self.links:
                link.end(GRACE_S)

    def _elapsed(self) -> float:
        return time.monotonic() - self.begin

    def _ending(self) -> bool:
        return self.kill_at is not None

    def _end(self, grace_s: float) -> None:
        """Ends all ranks on all hosts; mpirun sees them end, and ends too."""
        self.output.ending()
        at = time.monotonic() + grace_s
        self.kill_at = at if self.kill_at is None else min(at, self.kill_at)
        self.local_ranks.end(grace_s)
        for link in self.links:
            link.end(grace_s)

    def _signal_mpirun(self, number: int) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self.mpirun.pid, number)

    def _tick(self, now: float) -> None:
        if self.verbose or not self._ending():
            for line in self.noise.take(now - (0 if self.verbose else NOISE_DELAY_S)):
                self.output.say(f"[{self.command.starter}] {line}")
        self._exchange_signs_of_life(now)
        if self.closing_at is not None and now > self.closing_at and not self._ending():
            self._end(0)
        self._look_at_the_start(now)
        self._look_for_one_that_left(now)
        ended_at = self.mpirun_ended_at
        if ended_at is not None and now > ended_at + REPORTS_S and not self._ending():
            self._end(GRACE_S)
        if self._ending() and self.mpirun_ended_at is None:
            self._end_mpirun(now)

    def _exchange_signs_of_life(self, now: float) -> None:
        for link in list(self.links):
            if not link.tick(now):
                self.links.discard(link)
                link.close()
                if not self._ending():
                    self.error = host_lost(
                        link.host, "it has been silent for too long", link.errors
                    )
                    self._end(SILENT_GRACE_S)

    def _look_at_the_start(self, now: float) -> None:
        """Whether there is a host whose ranks should have started by now."""
        if now - self.begin < self.start_timeout_s or self._ending():
            return
        missing = set(range(self.command.num_proc)) - self.started
        if not missing or self.mpirun_ended_at is not None:
            return
        links = {link.host: link for link in self.links}
        hosts = [share.host.name for share in self.command.shares]
        found = []
        for host in hosts:
            lacking = len(missing & set(self.command.ranks_of(host)))
            if lacking:
                found.append((host, lacking, links[host].state() if host in links else ""))
        self.error = not_started(found, self.start_timeout_s)
        self._end(GRACE_S)

    def _look_for_one_that_left(self, now: float) -> None:
        """The others may wait for it for ever, and MPI may not notice."""
        if not self.well or self._ending():
            return
        early = self.well.keys() - self.done
        # In MPI_Init, in a collective or at last in MPI_Finalize they need all.
        if self.in_mpi - self.endings.keys() and early:
            rank = min(early, key=self.well.__getitem__)
            if now - max(self.well[rank] for rank in early) > LEAVE_S:
                self.error = left_early(*self._who(rank), self.well[rank] - self.begin)
                self._end(GRACE_S)
                return
        if self.run_on_said:
            return
        rank, at = self._last_that_left()
        left = self.command.num_proc - len(self.endings)
        if left and now - at > RUN_ON_S:
            self.run_on_said = True
            self.output.say(run_on(rank, self.command.host_of(rank), left, now - at))

    def _end_mpirun(self, now: float) -> None:
        """It ends by itself when it sees the ranks end, or it should: then it is helped."""
        if self.alone_since is None:
            if not self.local_ranks.keepers and not self.links:
                self.alone_since = now
            elif self.kill_at is not None and now > self.kill_at + 1:
                self.alone_since = now - MPIRUN_PATIENCE_S
        elif now > self.alone_since + MPIRUN_PATIENCE_S + 1:
            self._signal_mpirun(signal.SIGKILL)
        elif now > self.alone_since + MPIRUN_PATIENCE_S:
            self._signal_mpirun(signal.SIGTERM)

    # ------------------------------------------------------------ the end

    def _result(self) -> int:
        with contextlib.suppress(BrokenPipeError):
            self.output.finish()
        if self.signal is not None:
            return 128 + self.signal
        if self.error is not None:
            raise self.error
        said = self.noise.everything()
        improper = left_improperly(said)
        if improper in self.well:
            raise left_early(*self._who(improper), self.well[improper] - self.begin)
        failure = first_failure(self.failures, said)
        abort = None if failure else aborted(self.output.tails)
        if abort is not None:
            rank, ended = abort
            failure = Failure(*self._who(rank), ended, self._elapsed())
        if failure is not None and failure.rank in lost_a_peer(said):
            hosts = (share.host.name for share in self.command.shares)
            ranks = {host: self.command.ranks_of(host) for host in hosts}
            if host := host_without_words(ranks, self.started, self.endings):
                raise host_lost(host, "its ranks have gone without a word")
            if self.well:
                rank, at = self._last_that_left()
                raise left_early(*self._who(rank), at - self.begin)
        if failure is not None:
            self._say_failure(failure)
            return failure.exit_code
        if len(self.well) == self.command.num_proc:
            return 0
        return self._mpirun_failed()

    def _who(self, rank: int) -> tuple[int, str]:
        return rank, self.command.host_of(rank)

    def _say_failure(self, failure: Failure) -> None:
        tails = self.output.tails
        words = last_lines(tails[failure.rank])
        same = [rank for rank in sorted(tails) if last_lines(tails[rank]) == words]
        self.output.say(rank_failed(failure, words, same, self.command.num_proc))
        if self.well:
            rank, at = self._last_that_left()
            self.output.say(had_left(*self._who(rank), at - self.begin))

    def _last_that_left(self) -> tuple[int, float]:
        return max(self.well.items(), key=lambda item: item[1])

    def _mpirun_failed(self) -> int:
        """No rank has failed by itself, and yet not all have ended well."""
        code = self.mpirun.returncode
        if not self.started and code == 0:
            return 0  # it was told to do something else, as with --mpi-args --version
        if self.well:
            rank, at = self._last_that_left()
            raise left_early(*self._who(rank), at - self.begin)
        unsaid = [line for line in self.noise.take(float("inf")) if line]
        for line in unsaid:
            self.output.say(f"[{self.command.starter}] {line}")
        said = "see its words above" if self.noise.all else "it said nothing"
        ended = f"exit code {code}" if code >= 0 else f"signal {-code}"
        if not self.started:
            raise MpirunFailed(
                f"{self.command.starter} could not start the job ({ended}): {said};"
                " `hvdrun --dry-run` shows the command"
            )
        lost = [r for r in range(self.command.num_proc) if r not in self.well]
        raise MpirunFailed(
            f"{self.command.starter} ended the job ({ended}) while rank {lost[0]} on"
            f" {self.command.host_of(lost[0])} was running: {said}"
        )
