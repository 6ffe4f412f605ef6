"""How a finished job went: from its course to one record of its failure, and hvdrun's exit code;
`reports.failure_report` puts it into words. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from hvdrun.errors import HostLost, LaunchError
from hvdrun.job.course import Course
from hvdrun.job.leaving import may_be_of_mpi
from hvdrun.records import FEWEST_STEPS, summary_of
from hvdrun.reports import failure_report, late
from hvdrun.reports.failure_report import Failure, Verdict, host_lost, note, of_error, of_rank
from hvdrun.reports.lacking import in_words

# The exit code of a job that was preempted, by whichever signal: that of TERM.
PREEMPTED = 128 + signal.SIGTERM
# What a rank has told so long before the end is not of its end.
LATEST_S = 1.0
# Of what a rank wrote to stderr last: so many lines with a traceback in them, or without one.
LINES, FEW_LINES = 30, 10

# Patterns are compiled when a job fails, not at each start of hvdrun.
# The first line of Open MPI's message that it ends a rank; the next one names the communicator.
_REPORTER = r"\*\*\* reported by process \[\d+,(\d+)\]"
# By the connection that closed, or by the exit code of the ssh to it.
_LOST_DAEMON = (
    r"(?s)lost communication with a remote daemon.{1,300}?Remote daemon *: +\[\S+\] on node (\S+)"
)
_FAILED_DAEMON = r"(?s)daemon failed to report back .{1,600}?Remote host *: +(\S+)"
# Open MPI's sentence about a rank that left without MPI_Finalize; its line break may be anywhere.
_IMPROPER = r"process rank (\d+) with PID .*? exiting improperly"
# What a rank writes if it fails because another one has left: hvdlite, MPI, or a closed connection.
_MISSED = (
    r"HorovodInternalError|MPI_|MPI\.Exception|Fatal error in|[Cc]onnection|[Bb]roken ?[Pp]ipe"
)
# The core's words (_core/matching/leaving.c).
_DIED = r"HorovodInternalError: rank (\d+) on \S+ has died$"
# What MPICH's ranks print on an abort. MPICH kills them all at once, so their exit codes are lost.
_ABORT = rb"(?m)^Abort\((\d+)\) on node \d+"


def reach(course: Course, now: float, date: float, tails: Mapping[int, bytes]) -> Verdict:
    """`date`: now, in seconds since 1970; `tails`: the end of each rank's stderr."""
    found = _reach(course, now, date, tails)
    has_failed = course.ranks.failures or course.error
    if found.report and course.signal is None and (has_failed or not course.preemption.told):
        report = found.report._replace(operations=course.recorded.report())
        found = found._replace(report=report)
    if course.preemption.told:
        found = _preempted(course, found)
    most = max((record.steps for record in course.measured.records.values()), default=0)
    if not course.measured.records or (found.report and most < FEWEST_STEPS):
        return found
    age_s = course.measured.age_s(now) if found.exit_code else 0.0
    when = f"as told up to {age_s:.0f} s before the end: " if age_s >= LATEST_S else ""
    line = f"hvdrun: {when}{summary_of(course.measured.records, course.command.num_proc)}"
    table = late.report(course.measured.records, course.command.host_of)
    return found._replace(figures=(line, *table))


def _preempted(course: Course, found: Verdict) -> Verdict:
    """0 is for jobs that have run to their end: batch systems run those no more."""
    preemption, endings = course.preemption, course.ranks.endings
    is_in_order = found.error is None and not (course.ranks.failures or course.error)
    if is_in_order and preemption.is_the_end_of(endings):
        code = found.exit_code or PREEMPTED
        line = note("preempted", code=code)
        found = found._replace(exit_code=code, outcome="preempted", below=(line,))
    if course.requeue is None:
        return found
    if not is_in_order:
        return found._replace(below=(*found.below, note("not requeued")))
    if (failed := preemption.failed(endings)) is None:
        return found._replace(requeues=True)
    rank, host = course.ranks.who(failed)
    _, ended, _ = failure_report.in_words(re.sub("late |asked ", "", endings[failed]), host)
    line = note("rank not requeued", rank, host, ended=ended)
    return found._replace(below=(*found.below, line))


def _reach(course: Course, now: float, date: float, tails: Mapping[int, bytes]) -> Verdict:
    if course.signal is None:
        return _by_itself(course, now, date, tails)
    ended = Verdict(128 + course.signal, "interrupted")
    has_failed = course.ranks.failures or course.error  # before the signal came
    if not has_failed or course.signal == signal.SIGPIPE:  # nobody reads any more
        return ended
    found = _by_itself(course, now, date, tails)
    said = () if found.error is None else (f"hvdrun: {found.error}",)
    return found._replace(exit_code=ended.exit_code, outcome=ended.outcome, error=None, below=said)


def _by_itself(course: Course, now: float, date: float, tails: Mapping[int, bytes]) -> Verdict:
    given_up_at, given_up = course.hosts.gave_up or (float("inf"), None)
    # A host that heard nothing from hvdrun ends its ranks, and others see their connections close.
    ranks, said = course.ranks, course.mpirun.output.everything()
    if course.error is not None and not (given_up and isinstance(course.error, HostLost)):
        return _failed(_lost_before(course, said) or course.error)
    improper = left_improperly(said)
    if improper in ranks.well:
        return _failed(course.leaving.error_of(improper))
    failure = first_failure(ranks.failures, said)
    if failure is None and (abort := aborted(tails)) is not None:
        rank, ended = abort
        failure = Failure(*course.ranks.who(rank), ended, now - course.begin)
    is_first = failure is None or given_up_at <= course.begin + failure.after_s
    if given_up and is_first and not ranks.have_all_ended_well:
        return _failed(given_up)
    if failure is None:
        return Verdict(0) if ranks.have_all_ended_well else _mpirun_failed(course, said)
    lost = lost_a_peer(said)
    if (closer := course.closed_files.cause_of(failure, lost, course.begin)) is not None:
        after_s = course.closed_files.at[closer] - course.begin
        who = ranks.who(closer)
        return _failed(failure_report.error("closed files", *who, after_s=after_s, failure=failure))
    words = last_lines(tails.get(failure.rank, b""))
    if (left := died_for(words)) in ranks.well:
        line = note("had left when", left, failure=failure)
        return _failed(course.leaving.error_of(left), above=(line,))
    # Of several ranks that lost the same one, mpirun shows what one of them says.
    lost_too = {each.ended for each in ranks.failures if each.rank in lost}
    if failure.rank in lost or (failure.ended in lost_too and not words):
        if host := host_without_words(ranks.by_host(), ranks.started, ranks.endings):
            return _failed(host_lost(host, "its ranks ended without a report"))
        if ranks.well:
            return _failed(course.leaving.error_of(ranks.last_that_left()[0]))
    left = _missed(course, failure)
    if left is not None and not words and may_be_of_mpi(failure):
        line = note("had left when, without words", left, failure=failure)
        return _failed(course.leaving.error_of(left), above=(line,))
    failure = failure._replace(at=date - (now - course.begin) + failure.after_s)
    notes = _notes(course, failure, words, failure.rank in lost, left)
    report = of_rank(
        failure,
        evidence=tuple(words),
        same=tuple(rank for rank in sorted(tails) if last_lines(tails[rank]) == words),
        waited_at=course.recorded.waited_at(failure.rank),
        notes=tuple(notes),
    )
    num_proc = course.command.num_proc
    return Verdict(failure.exit_code, "failed", report, num_proc=num_proc)


def _failed(
    error: LaunchError, above: tuple[str, ...] = (), evidence: tuple[str, ...] = ()
) -> Verdict:
    return Verdict(error.code, "failed", of_error(error, evidence), error, above=above)


def _lost_before(course: Course, said: Sequence[str]) -> LaunchError | None:
    """mpirun ends its ssh to each host because one of them is lost: that one, if hvdrun has named
    another."""
    named, hosts = course.lost_without_words, course.ranks.by_host()
    host = lost_daemon(said) if named else None
    if host is None or host == named or host not in hosts:
        return None
    return host_lost(host, "mpirun has lost the connection to its daemon there")


def _missed(course: Course, failure: Failure) -> int | None:
    """The rank that had left too early when this one ended. An MPI that misses a rank may end
    others, or crash in them."""
    ranks, at = course.ranks, course.begin + failure.after_s
    if (left := ranks.that_left_before(at)) is not None:
        return left
    awaited = course.recorded.awaited_by(failure.rank) & ranks.well.keys()
    return min(
        (rank for rank in awaited if ranks.well[rank] <= at),
        key=ranks.well.__getitem__,
        default=None,
    )


def _notes(
    course: Course, failure: Failure, words: Sequence[str], lost_a_rank: bool, left: int | None
) -> Iterable[str]:
    """What else may be the cause of it. left: see `_missed`."""
    closed_at = course.closed_files.at.get(failure.rank)
    if left is None and course.ranks.well and any(re.search(_MISSED, line) for line in words):
        left = course.ranks.last_that_left()[0]
    if closed_at is not None:
        yield note("had closed files", before_s=course.begin + failure.after_s - closed_at)
    elif left is not None:
        after_s = course.ranks.well[left] - course.begin
        yield note("had left", *course.ranks.who(left), after_s=after_s)
    elif lost_a_rank:
        which = "the other rank" if course.command.num_proc == 2 else "another rank"
        yield note("lost a running rank", failure.rank, which=which)


def _mpirun_failed(course: Course, said: list[str]) -> Verdict:
    """No rank has failed by itself, but not all have ended with 0."""
    ranks, starter, code = course.ranks, course.command.starter, course.mpirun.code
    if not ranks.started and code == 0:
        return Verdict(0)  # mpirun was asked for something else, as with --mpi-args --version
    lines = tuple(line for line in course.mpirun.output.untaken() if line)
    shown = tuple(f"[{starter}] {line}" for line in lines)
    if (lack := in_words(starter, said)) is not None:
        return _failed(lack, shown, evidence=lines)
    if ranks.well:
        return _failed(course.leaving.error_of(ranks.last_that_left()[0]))
    words = "see its output above" if any(said) else "it printed nothing"
    if code is None:
        ended = "hvdrun had to kill it"
    else:
        ended = f"exit code {code}" if code >= 0 else f"signal {-code}"
    facts: dict[str, Any] = {"starter": starter, "ended": ended, "words": words}
    error = failure_report.error("no start", **facts)
    if ranks.started:
        rank = min(set(range(ranks.num_proc)) - ranks.well.keys())
        error = failure_report.error("mpirun ended", *ranks.who(rank), **facts)
    return _failed(error, shown, evidence=lines)


# ---- what mpirun's words and the ranks' last lines tell


def last_lines(stderr: bytes) -> list[str]:
    """The end of what a rank wrote to stderr, from its last traceback on if there is one."""
    text = stderr.decode(errors="replace").replace("\r\n", "\n")
    lines = [line.rpartition("\r")[2].rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    recent = lines[-LINES:]
    starts = [i for i, line in enumerate(recent) if line.startswith("Traceback (most recent")]
    # With chained exceptions, the first one begins the chain.
    return recent[starts[0] :] if starts else recent[-FEW_LINES:]


def first_failure(failures: Iterable[Failure], mpirun_said: Iterable[str]) -> Failure | None:
    """The failure that caused the others, as far as that can be known. It does not depend on the
    order in which the hosts report."""
    lost = lost_a_peer(mpirun_said)
    return min(
        failures,
        key=lambda failure: (failure.rank in lost, failure.late, failure.after_s, failure.rank),
        default=None,
    )


def lost_a_peer(mpirun_said: Iterable[str]) -> set[int]:
    """The ranks that Open MPI ended because another rank's connection closed: such an error belongs
    to no communicator, and so to no MPI call of the program."""
    ranks: set[int] = set()
    reporter = None
    for line in mpirun_said:
        if match := re.search(_REPORTER, line):
            reporter = int(match[1])
        elif reporter is not None and "*** on a NULL communicator" in line:
            ranks.add(reporter)
    return ranks


def lost_daemon(mpirun_said: Iterable[str]) -> str | None:
    """The host whose daemon Open MPI's mpirun has lost."""
    said = "\n".join(mpirun_said)
    found = [re.search(_LOST_DAEMON, said), re.search(_FAILED_DAEMON, said)]
    first = min(filter(None, found), key=lambda match: match.start(), default=None)
    return first[1] if first else None


def left_improperly(mpirun_said: Iterable[str]) -> int | None:
    """The rank that Open MPI says has ended without MPI_Finalize."""
    match = re.search(_IMPROPER, " ".join(mpirun_said))
    return int(match[1]) if match else None


def host_without_words(
    ranks_of: Mapping[str, Iterable[int]], started: Container[int], ended: Container[int]
) -> str | None:
    """A host that started ranks and has not reported how any of them ended: it was lost with them.
    Ranks of other hosts may have failed because of that, and may have been reported earlier."""
    for host, ranks in ranks_of.items():
        there = [rank for rank in ranks if rank in started]
        if there and not any(rank in ended for rank in there):
            return host
    return None


def aborted(stderr: Mapping[int, bytes]) -> tuple[int, str] | None:
    """The rank that called MPI_Abort and how it would have ended, read from what it wrote."""
    for rank, text in sorted(stderr.items()):
        if match := re.search(_ABORT, text):
            return rank, f"code {int(match[1]) & 255 or 1}"
    return None


def died_for(said: Iterable[str]) -> int | None:
    """The rank of which a rank's last lines say that it is gone."""
    found = [match for line in said if (match := re.search(_DIED, line))]
    return int(found[-1][1]) if found else None
