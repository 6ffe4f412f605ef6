"""The end of a job: what hvdrun shows and keeps of it, its exit code, and whether the batch
scheduler is to run it again."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Callable, Sequence

from hvdrun.job import verdict
from hvdrun.job.course import Course
from hvdrun.output.screen import Screen
from hvdrun.plan.schedulers.scheduler import Requeue
from hvdrun.reports.report_file import ReportFile

SCHEDULER_S = 30.0  # for its answer
# After a signal, hvdrun takes at most this long to write its remaining output.
LAST_WORDS_S = 2.0


def show(course: Course, screen: Screen, report: ReportFile) -> int:
    """Returns the exit code. Raises LaunchError if no rank is the cause."""
    output = screen.output
    found = verdict.reach(course, time.monotonic(), time.time(), output.tails)
    with contextlib.suppress(BrokenPipeError):
        output.finish(found.culprit)
    lines, rank = found.lines(), found.culprit
    is_shown = rank is not None and output.recent.end_with(rank, found.words)
    output.report(lines, shown=found.lines(repeat=not is_shown))
    if found.exit_code and (kept := keep_operations(course, screen)):
        output.say(kept)
    figures = course.measured.figures() if course.measured.records else ""
    if figures and (files := screen.files) and (lost := files.keep_metrics(figures)):
        output.say(lost)
    report.verdict, report.figures = found, figures
    if found.requeues and course.requeue is not None:
        output.say(requeue(course.requeue))
    if found.error is not None:
        raise found.error
    return found.exit_code


def keep_operations(course: Course, screen: Screen) -> str:
    """The line about it, or "". After Ctrl-C or a signal like it hvdrun ends at once, and which
    operation came last is what the signal happened to find."""
    files = screen.files
    if files is None or course.signal or not (operations := course.recorded.rows()):
        return ""
    return files.keep_operations(operations, course.recorded.summary())


def finish_output(screen: Screen, was_ended: bool, is_interrupted: Callable[[], bool]) -> None:
    """Waits until all output is written, or until a signal comes. was_ended: by Ctrl-C or a signal
    like it: then a reader that has stopped reading is not waited for."""
    writer = screen.writer
    until = time.monotonic() + LAST_WORDS_S if was_ended else float("inf")
    while not writer.drain(min(until, time.monotonic() + 0.1)):
        if time.monotonic() > until or is_interrupted():
            return
    if (files := screen.files) and (lost := files.lost()):
        screen.output.say(lost)
        writer.drain(time.monotonic() + LAST_WORDS_S)


def requeue(asking: Requeue) -> str:
    """The line to show. Once the scheduler has agreed, it ends this job, hvdrun too."""
    code, words = _run(asking.look)
    if code == 0 and re.search(asking.ending, words):
        return not_asked(asking.ended)
    code, words = _run(asking.ask)
    return after_requeue(asking.ask, words if code else None)


def after_requeue(command: Sequence[str], failure: str | None) -> str:
    """The line about the scheduler's answer to the command that asks it to run the job again."""
    words = f"`{' '.join(command)}`"
    if failure is None:
        return f"hvdrun: the job will run again: {words}"
    return (
        f"hvdrun: {words} failed: {failure or 'it printed nothing'}; submit the job again with"
        " sbatch (`sbatch --requeue` permits requeueing where Slurm by itself does not)"
    )


def not_asked(why: str) -> str:
    """The line about a job that the scheduler is ending already."""
    return f"hvdrun: the job is not requeued: {why}"


def _run(command: Sequence[str]) -> tuple[int, str]:
    """Its exit code, -1 if it has none; and its words, in one line."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SCHEDULER_S,
            start_new_session=True,  # a signal to hvdrun's group does not end it
        )
    except subprocess.TimeoutExpired:
        return -1, f"no answer within {SCHEDULER_S:g} s"
    except OSError as error:
        return -1, error.strerror or str(error)
    lines = map(str.strip, (done.stderr + done.stdout).splitlines())
    return done.returncode, "; ".join(filter(None, lines))
