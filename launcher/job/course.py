"""The course of a job: events in, with their times, and actions out. No clock and no I/O.

The first failure that is reported ends all ranks: TERM, a grace, KILL. `verdict` decides at the end
which failure came first: when a rank dies, others may fail because of that, and their hosts may
report before its own does.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping

from hvdrun.agent.frames import GRACE_S, SILENT_GRACE_S
from hvdrun.errors import HostLost, LaunchError
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
from hvdrun.job.ending import Ending, grace_s
from hvdrun.job.events import (
    Event,
    HostBack,
    HostConnected,
    HostEnded,
    HostGaveUp,
    HostQuiet,
    HostShares,
    HostSilent,
    HostTalks,
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
    SshSaid,
    StacksAsked,
    TimePassed,
    ToPassOn,
    ToStop,
)
from hvdrun.job.far_hosts import FarHost, FarHosts, failure_of
from hvdrun.job.leaving import ClosedFiles, Leaving
from hvdrun.job.mpirun import Mpirun
from hvdrun.job.passing_on import PassingOn, nobody
from hvdrun.job.preemption import Preemption
from hvdrun.job.pulses import Pulses
from hvdrun.job.ranks import Ranks
from hvdrun.job.recorded import Recorded
from hvdrun.job.signs_of_life import QUIET_S
from hvdrun.job.steps_told import StepsTold
from hvdrun.job.supervision import ONE_ACT_S, Supervision
from hvdrun.job.watcher import Watcher, limits
from hvdrun.machine import notes
from hvdrun.plan.command import Command
from hvdrun.plan.job_hosts import is_started_everywhere
from hvdrun.records import Record, parse
from hvdrun.reports import figures, lacking, prometheus
from hvdrun.reports.failure_report import (
    Failure,
    error,
    gave_up,
    host_silent,
    interrupted,
    misplaced,
    missing_program,
    not_started,
    note,
)
from hvdrun.reports.late import so_far

# After mpirun has ended, keepers and hosts have this long to report how their ranks ended.
REPORTS_S = 2.0
# What hosts report so soon after hvdrun itself did not run may be a consequence of that.
PAUSE_COUNTS_S = 10.0
# If a connection ends without a word of ssh, mpirun may have ended this ssh because another host is
# gone; the ssh to that one says so by then.
WORDS_S = 1.0


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
        self.summaries: dict[int, Record] = {}  # by rank, its latest
        self.steps_told = StepsTold()
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
            self._say,
            lambda *look: self.actions.append(Look(*look)),
            self._fail,
        )
        self.leaving = Leaving(self.ranks, self.watcher, begin, self._say, self._fail, self._end)

    def on(self, now: float, event: Event) -> list[Action]:
        """Returns the actions that the event asks for. `now` never goes back."""
        match event:
            case RankStarted(rank, host):
                self.ranks.started.add(rank)
                self.ranks.places[rank] = host
                if self.ranks.have_all_started and (wrong := self.ranks.misplaced()):
                    self._fail(now, misplaced(wrong, self.command.starter))
            case RankInMpi(rank):
                self.ranks.in_mpi.add(rank)
                self.watcher.on_mpi(now, rank)
            case RankLeftMpi(rank):
                self.ranks.in_mpi.discard(rank)
                self.ranks.done.add(rank)
            case RankSaid(rank, notes.SUMMARY, data):
                if record := parse(data):
                    self.steps_told.add(now, rank, self.summaries.get(rank), record)
                    self.summaries[rank] = record
            case RankSaid(rank, notes.PULSE, data):
                self.pulses.add(now, rank, data)
            case RankSaid(rank, notes.PREEMPTED):
                self.preemption.told.add(rank)
            case RankSaid(_, notes.STALLED, data):
                self.watcher.on_stall(now, data)
            case RankSaid(
                rank, (notes.INIT_BEGUN | notes.INIT_DONE | notes.INIT_FAILED) as kind, data
            ):
                self.watcher.on_note(now, rank, kind, data)
            case RankLooked(rank, look):
                self.watcher.on_look(now, rank, look)
            case RankRecorded(rank, operations, is_running):
                self.recorded.on_operations(rank, operations, is_running)
            case StacksAsked(asker):
                self.watcher.on_question(now, lambda text: self.actions.append(Answer(asker, text)))
            case MetricsAsked(asker, as_json):
                text = self.figures(now) if as_json else self._so_far(now)
                self.actions.append(Answer(asker, text))
            case RankClosedFiles(rank, at):
                self.closed_files.at.setdefault(rank, at)
                self.watcher.on_closed_files(now, rank)
            case RankEnded(rank, how, at):
                self._rank_ended(now, rank, how, at)
            case KeeperGone(rank, nonsense):
                if nonsense:
                    who = "the keeper of rank {} on {}".format(*self.ranks.who(rank))
                    self._fail(
                        now, error("not understood", *self.ranks.who(rank), who=who, what=nonsense)
                    )
                if rank not in self.ranks.endings:
                    how = "asked signal 9" if nonsense else "signal 9"
                    self._rank_ended(now, rank, how, now)
            case KeepersHere(connected):
                self.keepers = connected
            case HostConnected(host):
                self.hosts.connected.append(FarHost(host))
                if self.ending.has_begun:
                    self.actions.append(HangUp(host))
            case HostShares(host):
                self.ranks.told_elsewhere.add(host)
            case HostTalks(host):
                self.hosts.named(host).begin_to_talk()
            case SshSaid(host, text):
                self.hosts.named(host).add_said(text)
            case HostEnded():
                self._host_ended(now, event)
            case HostQuiet(host, silent_s, limit_s):
                self.hosts.quiet.add(now, host, silent_s, limit_s)
            case HostBack(host, silent_s):
                self.hosts.quiet.came_back(now, host, silent_s)
            case HostSilent(host, silent_s, limit_s):
                known = self.hosts.remove(host)
                self.ranks.lose(host)
                others = sorted(self.hosts.quiet.since)
                silent = host_silent(host, silent_s, limit_s, others, known.ssh_said)
                self._fail(now, silent, SILENT_GRACE_S)
            case HostGaveUp(host, silent_s, at):
                pause_s = self._recent_pause_s(now)
                self.hosts.give_up(at, gave_up(host, silent_s, pause_s))
                if not self.ending.has_begun:
                    self._end(now, SILENT_GRACE_S)
            case Paused(pause_s):
                self.paused_s += pause_s
                self.last_pause = now, pause_s
                if self.hosts.connected and pause_s >= QUIET_S and not self.ending.has_begun:
                    self._say(note("paused", pause_s=pause_s))
            case MpirunSaid(text):
                self.mpirun.output.feed(text, now)
            case MpirunOutputEnded():
                self.mpirun.output.end(now)
                self.mpirun.output_is_open = False
            case MpirunEnded(code):
                self.mpirun.code, self.mpirun.ended_at = code, now
                if not self.ending.has_begun:
                    self.actions.append(EndHosts(GRACE_S))
            case Interrupted(number, node):
                self._interrupted(now, number, node)
            case ToPassOn(number):
                if running := self.ranks.started - self.ranks.endings.keys():
                    request = self.passing_on.ask(now, number, running)
                    self.actions.append(PassOn(number, request))
                else:
                    self._say(nobody(number))
            case RankSignalled(rank, request, answer):
                self.passing_on.answered(rank, request, answer)
            case ToStop():
                self._say(note("does not stop"))
            case ReaderLeft():
                self.signal = self.signal or signal.SIGPIPE
                self._finish(now)
            case TimePassed():
                self._time_passed(now)
        for line in self.passing_on.reports(now):
            self._say(line)
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

    # ------------------------------------------------------------ ranks and hosts

    def _rank_ended(self, now: float, rank: int, how: str, at: float) -> None:
        ranks = self.ranks
        late = how.startswith("late ")
        how = how.removeprefix("late ")
        ranks.endings[rank] = how
        self.passing_on.gone(rank)
        if how == "code 0":
            self.leaving.on_left(now, rank, at)
        elif how.startswith("missing "):
            number = int(how.split()[1])
            self._fail(now, missing_program(self.command.program, *self.ranks.who(rank), number))
        elif how.startswith("lacks "):
            host = self.command.host_of(rank)
            self._fail(now, lacking.of_rank(rank, host, int(how.split()[1])))
        elif not how.startswith("asked "):
            failure = Failure(*self.ranks.who(rank), how, at - self.begin, late)
            # What failed before a host gave hvdrun up is no consequence of that.
            given_up = self.hosts.gave_up
            was_before = given_up is not None and at < given_up[0]
            ranks.fail(failure, self.ending.has_begun and not was_before)
            if ranks.failures and not self.ending.has_begun:
                self._end(now, GRACE_S)
        self.watcher.update(now)

    def _host_ended(self, now: float, event: HostEnded) -> None:
        host = self.hosts.remove(event.host)
        self.ranks.lose(host.name)
        has_started = self.ranks.has_started_on(host.name)
        pause_s = self._recent_pause_s(now)
        failure = failure_of(host, event, has_started, pause_s, self.command.python)
        if failure is None:
            return
        has_words = bool(host.ssh_said.strip())
        is_lost = isinstance(failure, HostLost)
        if is_lost and has_words and now <= self.wordless_until:
            self.error, self.wordless_until = failure, float("-inf")
            self.lost_without_words = None
        elif not self.ending.has_begun and is_lost and not has_words:
            self.wordless_until = now + WORDS_S
            self.lost_without_words = host.name
        self._fail(now, failure)

    def _recent_pause_s(self, now: float) -> float:
        """For how long hvdrun did not run, if what it learns now may come from that."""
        end, pause_s = self.last_pause
        return pause_s if now - end < PAUSE_COUNTS_S else 0.0

    # ------------------------------------------------------------ what the ranks have measured

    def _so_far(self, now: float) -> str:
        records, size = self.summaries, self.ranks.num_proc
        silent_s = self.steps_told.silent_s(now, records)
        return so_far(records, size, self.command.host_of, silent_s)

    def figures(self, now: float | None = None) -> str:
        """As JSON. now: None if the job has ended."""
        records, size = self.summaries, self.ranks.num_proc
        silent_s = None if now is None else self.steps_told.silent_s(now, records)
        return figures.as_json(records, size, self.command.host_of, silent_s)

    def exposition(self, labels: Mapping[str, object], now: float | None) -> str:
        """In Prometheus' text format, with these labels. now: None if the job has ended. Another
        thread may ask."""
        records, size, is_running = dict(self.summaries), self.ranks.num_proc, now is not None
        silent_s = None if now is None else self.steps_told.silent_s(now, records)
        host_of = self.command.host_of
        return prometheus.text_of(records, host_of, labels, size, is_running, silent_s)

    # ------------------------------------------------------------ time

    def _time_passed(self, now: float) -> None:
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
            self._finish(now)

    def _deadlines(self) -> Iterator[tuple[float, Callable[[float], None]]]:
        """The times at which something is due, and what. Doing it removes it from the list or
        postpones it."""
        if self.finished:
            return
        if (at := self.passing_on.due_at()) is not None:
            yield at, lambda now: self.actions.extend(map(Say, self.passing_on.reports(now)))
        yield from self.watcher.deadlines()
        if self.ending.has_begun:
            yield self.ending.give_up_at, self._finish
            if self.mpirun.runs:
                yield self.ending.mpirun_at(), self._help_mpirun
            return
        if (at := self.mpirun.noise_at()) is not None:
            yield at, self._show_noise
        if not self.mpirun.runs:
            yield self.mpirun.ended_at + REPORTS_S, lambda now: self._end(now, GRACE_S)
        elif not self.ranks.have_all_started:
            yield self.begin + self.request.start_timeout_s + self.paused_s, self._not_started
        if self.hosts.quiet.say_at is not None:
            yield self.hosts.quiet.say_at, self._say_quiet
        yield from self.leaving.deadlines()
        for at, _ in self.closed_files.to_say(self._in_mpi()):
            yield at, self._say_closed

    def _show_noise(self, now: float) -> None:
        for line in self.mpirun.noise(now):
            self._say(line)

    def _not_started(self, now: float) -> None:
        states = {host.name: host.state() for host in self.hosts.connected}
        missing = self.ranks.not_started
        found = [
            (host, lacking, states.get(host, ""))
            for host, ranks in self.ranks.by_host().items()
            if (lacking := len(missing.intersection(ranks)))
        ]
        self._fail(now, not_started(found, self.request.start_timeout_s))

    def _say_quiet(self, now: float) -> None:
        for line in self.hosts.quiet.lines(now):
            self._say(line)

    def _say_closed(self, now: float) -> None:
        for at, rank in list(self.closed_files.to_say(self._in_mpi())):
            if at <= now:
                self.closed_files.said.add(rank)
                self._say(note("closed files", *self.ranks.who(rank)))

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

    def _say(self, text: str) -> None:
        self.actions.append(Say(text))

    def _fail(self, now: float, error: LaunchError, grace_s: float = GRACE_S) -> None:
        """Only the first error counts: later ones may be consequences of ending the job."""
        if not self.ending.has_begun:
            self.error = error
            self._end(now, grace_s)

    def _interrupted(self, now: float, number: int, node: int) -> None:
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
        self._say(interrupted(number, before, running, given_s, of_nodes))
        self._end(now, given_s if before is None else 0, first)

    def _end(self, now: float, grace_s: float, first: int = signal.SIGTERM) -> None:
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

    def _finish(self, now: float) -> None:
        if not self.finished:
            self.finished = True
            self.hosts.quiet.unsaid.clear()  # the job no longer waits for them
            self._say_quiet(now)  # which have come back just before the end
            self.actions.append(Finish())
