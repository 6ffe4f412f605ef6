"""How a finished job went: the last lines that hvdrun shows, and its exit code. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hvdrun.errors import HostLost, LaunchError, MpirunFailed
from hvdrun.job.course import Course
from hvdrun.records import FEWEST_STEPS, summary_of
from hvdrun.reports import late
from hvdrun.reports.closed_files import broke_mpi, it_had_closed, lost_a_running_rank
from hvdrun.reports.failure_report import (
    Failure,
    aborted,
    died_for,
    ended_after_another,
    first_failure,
    had_left,
    host_lost,
    host_without_words,
    last_lines,
    left_improperly,
    lost_a_peer,
    lost_daemon,
    may_be_of_mpi,
    missed_a_peer,
    rank_failed,
)
from hvdrun.reports.lacking import in_words
from hvdrun.reports.preempted import left_preempted, not_requeued

# The exit code of a job that was preempted, by whichever signal: that of TERM.
PREEMPTED = 128 + signal.SIGTERM
# What a rank has told so long before the end is not of its end.
LATEST_S = 1.0


class Verdict(NamedTuple):
    exit_code: int
    error: LaunchError | None = None  # raised at the end, if no rank is the cause
    lines: tuple[str, ...] = ()  # to show
    culprit: int | None = None  # the rank that failed first
    words: int = 0  # how many of its last lines are among them
    brief: tuple[str, ...] = ()  # the same without these, if they have just been shown
    requeues: bool = False  # the batch scheduler is to be asked to run the job again


def reach(course: Course, now: float, date: float, tails: Mapping[int, bytes]) -> Verdict:
    """`date`: now, in seconds since 1970; `tails`: the end of each rank's stderr."""
    found = _reach(course, now, date, tails)
    if found.exit_code and course.signal is None and not _is_preempted(course):
        operations = course.recorded.report()
        found = found._replace(lines=(*found.lines, *operations), brief=(*found.brief, *operations))
    if course.preemption.told:
        found = _preempted(course, found)
    has_failed = found.culprit is not None or found.error is not None
    most = max((record.steps for record in course.measured.records.values()), default=0)
    if not course.measured.records or (has_failed and most < FEWEST_STEPS):
        return found
    age_s = course.measured.age_s(now) if found.exit_code else 0.0
    when = f"as told up to {age_s:.0f} s before the end: " if age_s >= LATEST_S else ""
    line = f"hvdrun: {when}{summary_of(course.measured.records, course.command.num_proc)}"
    table = late.report(course.measured.records, course.command.host_of)
    # Below the table, the report repeats the words of the rank that has failed.
    lines = line, *table, *found.lines
    return found._replace(lines=lines, brief=lines)


def _is_preempted(course: Course) -> bool:
    return bool(course.preemption.told) and not (course.ranks.failures or course.error)


def _preempted(course: Course, found: Verdict) -> Verdict:
    """0 is for jobs that have run to their end: batch systems run those no more."""
    preemption, endings = course.preemption, course.ranks.endings
    is_in_order = found.error is None and not (course.ranks.failures or course.error)
    if is_in_order and preemption.is_the_end_of(endings):
        code = found.exit_code or PREEMPTED
        found = found._replace(exit_code=code, lines=(*found.lines, left_preempted(code)))
    if course.requeue is None:
        return found
    if is_in_order and (failed := preemption.failed(endings)) is None:
        return found._replace(requeues=True)
    if is_in_order:
        assert failed is not None
        line = not_requeued(*course.ranks.who(failed), endings[failed])
    else:
        line = not_requeued()
    return found._replace(lines=(*found.lines, line), brief=(*found.brief, line))


def _reach(course: Course, now: float, date: float, tails: Mapping[int, bytes]) -> Verdict:
    if course.signal is None:
        return _by_itself(course, now, date, tails)
    code = 128 + course.signal
    has_failed = course.ranks.failures or course.error  # before the signal came
    if not has_failed or course.signal == signal.SIGPIPE:  # nobody reads any more
        return Verdict(code)
    found = _by_itself(course, now, date, tails)
    error = () if found.error is None else (f"hvdrun: {found.error}",)
    return found._replace(exit_code=code, error=None, lines=(*found.lines, *error))


def _lost_before(course: Course, said: Sequence[str]) -> HostLost | None:
    """mpirun ends its ssh to each host because one of them is lost: that one, if hvdrun has named
    another."""
    named, hosts = course.lost_without_words, course.ranks.by_host()
    host = lost_daemon(said) if named else None
    if host is None or host == named or host not in hosts:
        return None
    return host_lost(host, "mpirun has lost the connection to its daemon there")


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
        error = broke_mpi(*course.ranks.who(closer), after_s, failure)
        return Verdict(error.code, error, culprit=closer)
    words = last_lines(tails.get(failure.rank, b""))
    has_words = bool(words)
    if (left := died_for(words)) in ranks.well:
        lines = (ended_after_another(failure, left, has_words),)
        return _failed(course.leaving.error_of(left), lines)
    # Of several ranks that lost the same one, mpirun shows what one of them says.
    lost_too = {each.ended for each in ranks.failures if each.rank in lost}
    if failure.rank in lost or (failure.ended in lost_too and not has_words):
        if host := host_without_words(ranks.by_host(), ranks.started, ranks.endings):
            return _failed(host_lost(host, "its ranks ended without a report"))
        if ranks.well:
            return _failed(course.leaving.error_of(ranks.last_that_left()[0]))
    left = _missed(course, failure)
    if left is not None and not has_words and may_be_of_mpi(failure):
        return _failed(
            course.leaving.error_of(left), (ended_after_another(failure, left, has_words),)
        )
    failure = failure._replace(at=date - (now - course.begin) + failure.after_s)
    return _report(course, failure, tails, failure.rank in lost, left)


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


def _failed(error: LaunchError, lines: tuple[str, ...] = ()) -> Verdict:
    return Verdict(error.code, error, lines)


def _report(
    course: Course,
    failure: Failure,
    tails: Mapping[int, bytes],
    lost_a_rank: bool,
    left: int | None,
) -> Verdict:
    """left: see `_missed`."""
    words = last_lines(tails.get(failure.rank, b""))
    same = [rank for rank in sorted(tails) if last_lines(tails[rank]) == words]
    after = []
    closed_at = course.closed_files.at.get(failure.rank)
    if closed_at is not None:
        after.append(it_had_closed(course.begin + failure.after_s - closed_at))
    elif left is not None:
        after.append(_had_left(course, left))
    elif course.ranks.well and missed_a_peer(words):
        after.append(_had_left(course, course.ranks.last_that_left()[0]))
    elif lost_a_rank:
        after.append(lost_a_running_rank(failure.rank, course.command.num_proc - 1))
    waited_at = course.recorded.waited_at(failure.rank)
    lines, brief = (
        (rank_failed(failure, words, same, course.command.num_proc, repeat, waited_at), *after)
        for repeat in (True, False)
    )
    return Verdict(failure.exit_code, None, lines, failure.rank, len(words), brief)


def _had_left(course: Course, rank: int) -> str:
    return had_left(*course.ranks.who(rank), course.ranks.well[rank] - course.begin)


def _mpirun_failed(course: Course, said: list[str]) -> Verdict:
    """No rank has failed by itself, but not all have ended with 0."""
    ranks, starter, code = course.ranks, course.command.starter, course.mpirun.code
    if not ranks.started and code == 0:
        return Verdict(0)  # mpirun was asked for something else, as with --mpi-args --version
    lines = tuple(f"[{starter}] {line}" for line in course.mpirun.output.untaken() if line)
    if (lack := in_words(starter, said)) is not None:
        return _failed(lack, lines)
    if ranks.well:
        return _failed(course.leaving.error_of(ranks.last_that_left()[0]))
    words = "see its output above" if any(said) else "it printed nothing"
    if code is None:
        ended = "hvdrun had to kill it"
    else:
        ended = f"exit code {code}" if code >= 0 else f"signal {-code}"
    if not ranks.started:
        error = MpirunFailed(
            f"{starter} could not start the job ({ended}): {words};"
            " `hvdrun --dry-run` shows the command"
        )
    else:
        rank = min(set(range(ranks.num_proc)) - ranks.well.keys())
        error = MpirunFailed(
            f"{starter} ended the job ({ended}) while rank {rank} on"
            f" {course.command.host_of(rank)} was running: {words}"
        )
    return _failed(error, lines)
