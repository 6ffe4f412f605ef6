"""What happens to a job: each event is a value that knows what it changes in the `Course`.

BY_FRAME makes them from what keepers send. Nothing here does I/O, and no event has a clock: `now`
is the time when it happens.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import NamedTuple

from hvdrun.agent import frames
from hvdrun.agent.frames import GRACE_S, SILENT_GRACE_S
from hvdrun.errors import HostLost, LaunchError
from hvdrun.job.actions import Answer, EndHosts, HangUp, PassOn
from hvdrun.job.course import Course, Event
from hvdrun.job.far_hosts import QUIET_S, FarHost, refused
from hvdrun.job.passing_on import not_passed_on
from hvdrun.machine import notes
from hvdrun.reports.failure_report import (
    daemon_failed,
    error,
    gave_up,
    host_silent,
    misplaced,
    note,
)

# If a connection ends without a word of ssh, mpirun may have ended this ssh because another host is
# gone; the ssh to that one says so by then.
WORDS_S = 1.0


# -------------------------------------------------------------------- ranks


class RankStarted(NamedTuple):
    """host: over whose connection hvdrun has learnt it; "": the rank runs on hvdrun's machine."""

    rank: int
    host: str = ""

    def happen(self, course: Course, now: float) -> None:
        course.ranks.started.add(self.rank)
        course.ranks.places[self.rank] = self.host
        if course.ranks.have_all_started and (wrong := course.ranks.misplaced()):
            course.fail(now, misplaced(wrong, course.command.starter))


class RankInMpi(NamedTuple):
    """The rank has begun MPI_Init. Only some MPIs let the keeper see it."""

    rank: int

    def happen(self, course: Course, now: float) -> None:
        course.ranks.in_mpi.add(self.rank)
        course.watcher.on_mpi(now, self.rank)


class RankLeftMpi(NamedTuple):
    """The rank has finished MPI_Finalize."""

    rank: int

    def happen(self, course: Course, now: float) -> None:
        course.ranks.in_mpi.discard(self.rank)
        course.ranks.done.add(self.rank)


class RankSaid(NamedTuple):
    """hvdlite in the rank has told its keeper this note (see `machine.notes`): its kind and data.
    Valid in its size; the data is the rank's, and not to be trusted."""

    rank: int
    kind: bytes
    data: bytes = b""

    def happen(self, course: Course, now: float) -> None:
        match self.kind:
            case notes.SUMMARY:
                course.measured.add(now, self.rank, self.data)
            case notes.PULSE:
                course.pulses.add(now, self.rank, self.data)
            case notes.PREEMPTED:
                course.preemption.told.add(self.rank)
            case notes.STALLED:
                course.watcher.on_stall(now, self.data)
            case notes.INIT_BEGUN | notes.INIT_DONE | notes.INIT_FAILED:
                course.watcher.on_note(now, self.rank, self.kind, self.data)


class RankLooked(NamedTuple):
    """The keeper's answer about what the rank does, as `machine.looks` packs it."""

    rank: int
    look: bytes

    def happen(self, course: Course, now: float) -> None:
        course.watcher.on_look(now, self.rank, self.look)


class RankRecorded(NamedTuple):
    """The rank's last operations, as its keeper packs them (`agent.rank.notes`). is_running: as it
    looked at its stack; else they come before its RankEnded."""

    rank: int
    operations: bytes
    is_running: bool = False

    def happen(self, course: Course, _: float) -> None:
        course.recorded.on_operations(self.rank, self.operations, self.is_running)


class RankClosedFiles(NamedTuple):
    """The rank runs on and has closed its end of PMI, or of the way for notes; `at` by the clock of
    this host. A program that closes these closes all descriptors that it does not know."""

    rank: int
    at: float

    def happen(self, course: Course, now: float) -> None:
        course.closed_files.at.setdefault(self.rank, self.at)
        course.watcher.on_closed_files(now, self.rank)


class RankEnded(NamedTuple):
    """`how` as the keeper writes it (see frames.EXIT); `at` by the clock of this host."""

    rank: int
    how: str
    at: float

    def happen(self, course: Course, now: float) -> None:
        course.rank_ended(now, self.rank, self.how, self.at)


class KeeperGone(NamedTuple):
    """The keeper of a rank has ended; a RankEnded may or may not have come before."""

    rank: int
    nonsense: str = ""  # what has come from it that is no message, so that it was hung up on

    def happen(self, course: Course, now: float) -> None:
        if self.nonsense:
            rank_and_host = course.ranks.who(self.rank)
            who = "the keeper of rank {} on {}".format(*rank_and_host)
            course.fail(now, error("not understood", *rank_and_host, who=who, what=self.nonsense))
        if self.rank not in course.ranks.endings:
            how = "asked signal 9" if self.nonsense else "signal 9"
            course.rank_ended(now, self.rank, how, now)


class RankSignalled(NamedTuple):
    """A keeper's answer to a signal that was passed on: see `agent.signals.pass_on`."""

    rank: int
    request: int
    answer: str

    def happen(self, course: Course, _: float) -> None:
        course.passing_on.answered(self.rank, self.request, self.answer)


class KeepersHere(NamedTuple):
    """The number of keepers of this host that are connected now."""

    connected: int

    def happen(self, course: Course, _: float) -> None:
        course.keepers = self.connected


def _ended(rank: int, payload: bytes, _: str) -> Event:
    how, _, at_ns = payload.decode().rpartition(" ")
    return RankEnded(rank, how, int(at_ns) / 1e9)


def _signalled(rank: int, payload: bytes, _: str) -> Event:
    _, request, answer = payload.decode().split()
    return RankSignalled(rank, int(request), answer)


# What a keeper sends, by the kind of frame: from its rank, the payload, which `frames.check` has
# seen, and the host of the connection.
BY_FRAME: dict[bytes, Callable[[int, bytes, str], Event]] = {
    frames.RANK: lambda rank, _, host: RankStarted(rank, host),
    frames.MPI_BEGUN: lambda rank, *_: RankInMpi(rank),
    frames.MPI_DONE: lambda rank, *_: RankLeftMpi(rank),
    frames.NOTE: lambda rank, note, _: RankSaid(rank, note[:1], note[1:]),
    frames.LOOKED: lambda rank, look, _: RankLooked(rank, look),
    frames.BLACK_BOX: lambda rank, box, _: RankRecorded(rank, box),
    frames.BLACK_BOX_NOW: lambda rank, box, _: RankRecorded(rank, box, is_running=True),
    frames.CLOSED: lambda rank, words, _: RankClosedFiles(rank, int(words.split()[1]) / 1e9),
    frames.EXIT: _ended,
    frames.SIGNALLED: _signalled,
    frames.KEEPER_GONE: lambda rank, what, _: KeeperGone(rank, what.decode(errors="replace")),
}


# -------------------------------------------------------------------- other hosts


class HostConnected(NamedTuple):
    """hvdrun has started to connect to another host; ssh has not connected yet."""

    host: str

    def happen(self, course: Course, _: float) -> None:
        course.hosts.connected.append(FarHost(self.host))
        if course.ending.has_begun:
            course.actions.append(HangUp(self.host))


class HostTalks(NamedTuple):
    """The host agent has sent its first message: ssh has connected."""

    host: str

    def happen(self, course: Course, _: float) -> None:
        course.hosts.named(self.host).begin_to_talk()


class HostShares(NamedTuple):
    """The host is a machine that hvdrun knows by another name, too: its ranks may be told of under
    that one."""

    host: str

    def happen(self, course: Course, _: float) -> None:
        course.ranks.told_elsewhere.add(self.host)


class SshSaid(NamedTuple):
    """ssh (or srun in its place) or the remote shell wrote this to stderr."""

    host: str
    text: bytes

    def happen(self, course: Course, _: float) -> None:
        course.hosts.named(self.host).add_said(self.text)


class HostEnded(NamedTuple):
    """The connection to the host has ended."""

    host: str
    refused: str = ""  # why the host agent can't run ranks there
    daemon_status: int | None = None  # MPI's daemon's exit code, once everything there has ended
    daemon_said: bytes = b""  # or the login shell, if the host agent has not started
    nonsense: str = ""  # what has come from it that is no message, so that hvdrun has hung up

    def happen(self, course: Course, now: float) -> None:
        host = course.hosts.remove(self.host)
        course.ranks.lose(host.name)
        failure: LaunchError | None = None
        if self.nonsense:
            who = f"hvdrun's agent on {host.name}"
            failure = error("not understood", host=host.name, who=who, what=self.nonsense)
        elif self.refused:
            failure = refused(host.name, self.refused)
        elif self.daemon_status is None:
            failure = host.lost(course.command.python, self.daemon_said, course.recent_pause_s(now))
        elif self.daemon_status and not course.ranks.has_started_on(host.name):
            failure = daemon_failed(host.name, self.daemon_status, self.daemon_said)
        if failure is None:  # if ranks have started, or the daemon ended with 0, mpirun reports it
            return
        has_words = bool(host.ssh_said.strip())
        is_lost = isinstance(failure, HostLost)
        if is_lost and has_words and now <= course.wordless_until:
            course.error, course.wordless_until = failure, float("-inf")
            course.lost_without_words = None
        elif not course.ending.has_begun and is_lost and not has_words:
            course.wordless_until = now + WORDS_S
            course.lost_without_words = host.name
        course.fail(now, failure)


class HostQuiet(NamedTuple):
    """The host has given no sign of life for some seconds."""

    host: str
    silent_s: float
    limit_s: float  # after which it is lost

    def happen(self, course: Course, now: float) -> None:
        course.hosts.quiet.add(now, self.host, self.silent_s, self.limit_s)


class HostBack(NamedTuple):
    """A quiet host has given a sign of life."""

    host: str
    silent_s: float

    def happen(self, course: Course, now: float) -> None:
        course.hosts.quiet.came_back(now, self.host, self.silent_s)


class HostSilent(NamedTuple):
    """The host gave no sign of life for too long. The connection to it is closed."""

    host: str
    silent_s: float
    limit_s: float

    def happen(self, course: Course, now: float) -> None:
        known = course.hosts.remove(self.host)
        course.ranks.lose(self.host)
        others = sorted(course.hosts.quiet.since)
        silent = host_silent(self.host, self.silent_s, self.limit_s, others, known.ssh_said)
        course.fail(now, silent, SILENT_GRACE_S)


class HostGaveUp(NamedTuple):
    """The host ends its ranks, as hvdrun was silent for too long; `at` by this host's clock."""

    host: str
    silent_s: float
    at: float

    def happen(self, course: Course, now: float) -> None:
        why = gave_up(self.host, self.silent_s, course.recent_pause_s(now))
        course.hosts.give_up(self.at, why)
        if not course.ending.has_begun:
            course.end(now, SILENT_GRACE_S)


# -------------------------------------------------------------------- mpirun


class MpirunSaid(NamedTuple):
    """mpirun or one of its daemons wrote this."""

    text: bytes

    def happen(self, course: Course, now: float) -> None:
        course.mpirun.output.feed(self.text, now)


class MpirunOutputEnded(NamedTuple):
    """No process has mpirun's output open any more."""

    def happen(self, course: Course, now: float) -> None:
        course.mpirun.output.end(now)
        course.mpirun.output_is_open = False


class MpirunEnded(NamedTuple):
    code: int  # -n: by signal n

    def happen(self, course: Course, now: float) -> None:
        course.mpirun.code, course.mpirun.ended_at = self.code, now
        if not course.ending.has_begun:
            course.actions.append(EndHosts(GRACE_S))


# -------------------------------------------------------------------- the user, and hvdrun itself


class StacksAsked(NamedTuple):
    """Somebody wants to know where the ranks are."""

    asker: int

    def happen(self, course: Course, now: float) -> None:
        course.watcher.on_question(
            now, lambda text: course.actions.append(Answer(self.asker, text))
        )


class MetricsAsked(NamedTuple):
    """Somebody wants to know where the time of the ranks' steps goes. as_json: in figures."""

    asker: int
    as_json: bool = False

    def happen(self, course: Course, now: float) -> None:
        text = course.measured.figures(now) if self.as_json else course.measured.so_far(now)
        course.actions.append(Answer(self.asker, text))


class Interrupted(NamedTuple):
    """Ctrl-C, or a signal like it."""

    number: int
    node: int = 0  # whose hvdrun got it, where each host runs one (see `rendezvous`)

    def happen(self, course: Course, now: float) -> None:
        course.interrupt(now, self.number, self.node)


class ToPassOn(NamedTuple):
    """hvdrun got a signal that is for the ranks."""

    number: int

    def happen(self, course: Course, now: float) -> None:
        if running := course.ranks.started - course.ranks.endings.keys():
            request = course.passing_on.ask(now, self.number, running)
            course.actions.append(PassOn(self.number, request))
        else:
            course.say(not_passed_on(self.number))


class ToStop(NamedTuple):
    """Ctrl-Z."""

    def happen(self, course: Course, _: float) -> None:
        course.say(note("does not stop"))


class ReaderLeft(NamedTuple):
    """hvdrun can't write: its reader is gone (`hvdrun … | head`), or the disk is full."""

    def happen(self, course: Course, now: float) -> None:
        course.signal = course.signal or signal.SIGPIPE
        course.finish(now)


class Paused(NamedTuple):
    """hvdrun itself did not run: it was stopped, or this machine was suspended."""

    pause_s: float

    def happen(self, course: Course, now: float) -> None:
        course.paused_s += self.pause_s
        course.last_pause = now, self.pause_s
        is_told = course.hosts.connected and not course.ending.has_begun
        if is_told and self.pause_s >= QUIET_S:
            course.say(note("paused", pause_s=self.pause_s))


class TimePassed(NamedTuple):
    """Nothing else has happened until now."""

    def happen(self, course: Course, now: float) -> None:
        course.look_at_time(now)
