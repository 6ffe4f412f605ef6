"""The course of a job: events in, with their times, and actions out. No clock and no I/O.

The first failure that is reported ends all ranks: TERM, a grace, KILL. `verdict` decides at the end
which failure came first: when a rank dies, others may fail because of that, and their hosts may
report before its own does.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from hvdrun.agent.frames import GRACE_S
from hvdrun.errors import LaunchError
from hvdrun.job.actions import Action, EndAll, Finish, Look, Release, Say, SignalMpirun
from hvdrun.job.ending import Ending, grace_s
from hvdrun.job.far_hosts import FarHosts
from hvdrun.job.leaving import ClosedFiles, Leaving
from hvdrun.job.mpirun import Mpirun
from hvdrun.job.passing_on import PassingOn
from hvdrun.job.progress import Measured, Pulses
from hvdrun.job.ranks import Preemption, Ranks, Recorded
from hvdrun.job.watcher import Watcher, limits
from hvdrun.plan.command import Command
from hvdrun.plan.job_hosts import is_started_everywhere
from hvdrun.plan.request import Request
from hvdrun.plan.schedulers.scheduler import Requeue
from hvdrun.reports import lacking
from hvdrun.reports.failure_report import Failure, interrupted, missing_program, not_started, note
from hvdrun.reports.report_file import ReportFile

# After mpirun has ended, keepers and hosts have this long to report how their ranks ended.
REPORTS_S = 2.0
# What hosts report so soon after hvdrun itself did not run may be a consequence of that.
PAUSE_COUNTS_S = 10.0
# The same signal twice within this time is one act: wrappers (timeout, uv run) pass on what they or
# the whole process group have got.
ONE_ACT_S = 0.05


@dataclass(frozen=True)
class Supervision:
    """How the user wants a job to be watched."""

    request: Request
    cwd: str = ""  # the ranks' folder: places in their code are named from there
    requeue: Requeue | None = None  # if the batch scheduler is to run a preempted job again
    report: ReportFile = field(default_factory=ReportFile)


class Event(Protocol):
    """What has happened; `events` has all of them."""

    def happen(self, course: Course, now: float) -> None:
        """Tells the course."""


class Course:
    """`begin`: when mpirun starts, by the same clock as all other times here."""

    def __init__(self, command: Command, begin: float, supervision: Supervision) -> None:
        self.command = command
        self.begin = begin
        self.request, self.requeue = supervision.request, supervision.requeue
        self.ranks = Ranks(command)
        self.hosts = FarHosts()
        self.paused_s = 0.0  # for how long hvdrun did not run, in total
        self.last_pause = (float("-inf"), 0.0)  # its end, and for how long
        # The host that `error` calls lost, if its ssh did not say so: it may be another one.
        self.lost_without_words: str | None = None
        self.wordless_until = float("-inf")  # until then the ssh to that other one may say it
        self.keepers = 0  # number connected on this host
        hosts = [share.host.name for share in command.shares]
        self.mpirun = Mpirun(command.starter, self.request.verbose, hosts)
        self.ending = Ending()
        self.released = 0  # the number of ranks that had ended at the last Release
        self.passing_on = PassingOn()
        self.preemption = Preemption()
        self.measured = Measured(command)
        self.pulses = Pulses()
        self.recorded = Recorded(self.ranks)
        self.error: LaunchError | None = None
        self.signal: int | None = None  # that hvdrun was ended with
        self.signalled: dict[int, tuple[int, float]] = {}  # node → its first signal, and when
        self.finished = False
        self.actions: list[Action] = []  # of the event that is being handled
        self.closed_files = ClosedFiles()
        self.watcher = Watcher(
            self.ranks,
            self.recorded,
            limits(command.environment),
            begin,
            supervision.cwd,
            self.say,
            lambda *look: self.actions.append(Look(*look)),
            self.fail,
        )
        self.leaving = Leaving(self.ranks, self.watcher, begin, self.say, self.fail, self.end)

    def on(self, now: float, event: Event) -> list[Action]:
        """Returns the actions that the event asks for. `now` never goes back."""
        event.happen(self, now)
        for line in self.passing_on.reports(now):
            self.say(line)
        self._release()
        actions, self.actions = self.actions, []
        return actions

    def wake_at(self) -> float | None:
        """The next time at which something is due even if nothing happens; None: never."""
        return min((at for at, _ in self._deadlines()), default=None)

    @property
    def may_start_again(self) -> bool:
        """mpirun failed by chance, and no rank had started."""
        return not self.ranks.started and not self.signal and self.mpirun.output.shows_ill_luck()

    # ------------------------------------------------------------ for events

    def rank_ended(self, now: float, rank: int, how: str, at: float) -> None:
        ranks = self.ranks
        late = how.startswith("late ")
        how = how.removeprefix("late ")
        ranks.endings[rank] = how
        self.passing_on.gone(rank)
        if how == "code 0":
            self.leaving.on_left(now, rank, at)
        elif how.startswith("missing "):
            number = int(how.split()[1])
            self.fail(now, missing_program(self.command.program, *self.ranks.who(rank), number))
        elif how.startswith("lacks "):
            host = self.command.host_of(rank)
            self.fail(now, lacking.of_rank(rank, host, int(how.split()[1])))
        elif not how.startswith("asked "):
            failure = Failure(*self.ranks.who(rank), how, at - self.begin, late)
            # What failed before a host gave hvdrun up is no consequence of that.
            given_up = self.hosts.gave_up
            was_before = given_up is not None and at < given_up[0]
            ranks.fail(failure, self.ending.has_begun and not was_before)
            if ranks.failures and not self.ending.has_begun:
                self.end(now, GRACE_S)
        self.watcher.update(now)

    def recent_pause_s(self, now: float) -> float:
        """For how long hvdrun did not run, if what it learns now may come from that."""
        end, pause_s = self.last_pause
        return pause_s if now - end < PAUSE_COUNTS_S else 0.0

    # ------------------------------------------------------------ time

    def look_at_time(self, now: float) -> None:
        if self.request.verbose or not self.ending.has_begun:
            self._show_noise(now)
        while due := min(self._deadlines(), key=lambda each: each[0], default=None):
            at, act = due
            if at > now:
                break
            act(now)
        if self.ending.has_begun and self.mpirun.runs:
            self.ending.look_at_mpirun(now, is_alone=not (self.keepers or self.hosts.connected))
        mpirun_is_there = self.mpirun.runs or self.mpirun.output_is_open
        if not (mpirun_is_there or self.hosts.connected or self.keepers):
            self.finish(now)

    def _deadlines(self) -> Iterator[tuple[float, Callable[[float], None]]]:
        """The times at which something is due, and what. Doing it removes it from the list or
        postpones it."""
        if self.finished:
            return
        if (at := self.passing_on.due_at()) is not None:
            yield at, lambda now: self.actions.extend(map(Say, self.passing_on.reports(now)))
        yield from self.watcher.deadlines()
        if self.ending.has_begun:
            yield self.ending.give_up_at, self.finish
            if self.mpirun.runs:
                yield self.ending.mpirun_at(), self._help_mpirun
            return
        if (at := self.mpirun.noise_at()) is not None:
            yield at, self._show_noise
        if not self.mpirun.runs:
            yield self.mpirun.ended_at + REPORTS_S, lambda now: self.end(now, GRACE_S)
        elif not self.ranks.have_all_started:
            yield self.begin + self.request.start_timeout_s + self.paused_s, self._not_started
        if self.hosts.quiet.say_at is not None:
            yield self.hosts.quiet.say_at, self._say_quiet
        yield from self.leaving.deadlines()
        for at, _ in self.closed_files.to_say(self._in_mpi()):
            yield at, self._say_closed

    def _show_noise(self, now: float) -> None:
        for line in self.mpirun.noise(now):
            self.say(line)

    def _not_started(self, now: float) -> None:
        states = {host.name: host.state() for host in self.hosts.connected}
        missing = self.ranks.not_started
        found = [
            (host, lacking, states.get(host, ""))
            for host, ranks in self.ranks.by_host().items()
            if (lacking := len(missing.intersection(ranks)))
        ]
        self.fail(now, not_started(found, self.request.start_timeout_s))

    def _say_quiet(self, now: float) -> None:
        for line in self.hosts.quiet.lines(now):
            self.say(line)

    def _say_closed(self, now: float) -> None:
        for at, rank in list(self.closed_files.to_say(self._in_mpi())):
            if at <= now:
                self.closed_files.said.add(rank)
                self.say(note("closed files", *self.ranks.who(rank)))

    def _in_mpi(self) -> set[int]:
        """The ranks of which hvdrun knows that they have begun to use MPI, and that run."""
        ranks = self.ranks
        return (self.watcher.calls.keys() | ranks.in_mpi) - ranks.done - ranks.endings.keys()

    def _help_mpirun(self, now: float) -> None:
        self.ending.look_at_mpirun(now, is_alone=False)
        number = self.ending.help_mpirun(now)
        if number is not None:
            self.actions.append(SignalMpirun(number))

    # ------------------------------------------------------------ actions

    def say(self, text: str) -> None:
        self.actions.append(Say(text))

    def fail(self, now: float, error: LaunchError, grace_s: float = GRACE_S) -> None:
        """Only the first error counts: later ones may be consequences of ending the job."""
        if not self.ending.has_begun:
            self.error = error
            self.end(now, grace_s)

    def interrupt(self, now: float, number: int, node: int) -> None:
        """The second signal on a node ends the job without a grace. One on each node may be a
        single act: platforms end a job's hosts together, or one after the other."""
        before, self.signal = self.signal, self.signal or number
        is_first_here = node not in self.signalled
        first_here, at = self.signalled.setdefault(node, (number, now))
        if before is not None and (
            is_first_here or (number == first_here and now - at < ONE_ACT_S)
        ):
            return
        first = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        given_s = self.request.grace_period_s
        if given_s is None:
            given_s = grace_s(number)
        if self.ending.kill_at is not None:  # the ranks have had the first signal
            first = signal.SIGTERM
            given_s = min(given_s, max(0.0, self.ending.kill_at - now))
        running, of_nodes = len(self.ranks.awaited), is_started_everywhere(self.request)
        self.say(interrupted(number, before, running, given_s, of_nodes))
        self.end(now, given_s if before is None else 0, first)

    def end(self, now: float, grace_s: float, first: int = signal.SIGTERM) -> None:
        self.ending.begin(now, grace_s, first)
        self.watcher.is_over = True
        self.actions.append(EndAll(grace_s, first))

    def _release(self) -> None:
        """Until all ranks have ended, the keepers hide from MPI that some have: MPI would end the
        others, which may be saving."""
        ended = len(self.ranks.endings)
        if self.ending.has_begun and not self.ranks.awaited and ended > self.released:
            self.released = ended
            self.actions.append(Release())

    def finish(self, now: float) -> None:
        if not self.finished:
            self.finished = True
            self.hosts.quiet.unsaid.clear()  # the job no longer waits for them
            self._say_quiet(now)  # which have come back just before the end
            self.actions.append(Finish())
