"""What is shown of a job that runs, worked out from what is known of it. No clock and no I/O."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from hvdrun.job.course import Course
from hvdrun.job.progress import Recent
from hvdrun.pulse import Pulse, every_s
from hvdrun.records import FEWEST_STEPS, Record
from hvdrun.reports.failure_report import names
from hvdrun.reports.late import compare, verdicts, with_steps

# After so long without a step of any rank, or after so many times a step's own time, it is said.
STILL_S = 10.0
_STILL_STEPS = 3


class Verdicts(NamedTuple):
    """texts: of the last minute, once the ranks tell of it. communication_s: what it takes of a
    step, by rank, of the ranks of which that is known."""

    texts: tuple[str, ...] = ()
    communication_s: Mapping[int, float] = {}


def judge(records: Mapping[int, Record], host_of: Callable[[int], str]) -> Verdicts:
    """Who is slow now, as `--summary` and `--metrics` say it; nothing while too few steps can be
    compared."""
    timed = with_steps(records)
    recent = with_steps({rank: record.recent for rank, record in records.items() if record.recent})
    head = ""
    if recent and len(recent) == len(timed):
        timed = recent
        head = f"last {max(record.seconds for record in recent.values()):.0f} s: "
    if not timed:
        return Verdicts()
    found = compare(timed)
    known = {
        rank: each.communication_s for each in found or () if each.steps for rank in each.ranks
    }
    if found is not None:
        found = [each for each in found if each.steps >= FEWEST_STEPS]
    return Verdicts(tuple(f"{head}{text}" for text in verdicts(timed, found, host_of)), known)


class Parts(NamedTuple):
    """Of one step of a rank now, in seconds: where its time goes."""

    computing: float
    data: float
    waiting: float  # for other ranks
    communication: float

    @property
    def step_s(self) -> float:
        return sum(self)


class RankFigures(NamedTuple):
    """state: in a word, if the rank does not run. parts: None while they are not known."""

    rank: int
    host: str
    state: str = ""
    parts: Parts | None = None


class Value(NamedTuple):
    """The mean over the ranks that report it, or of the others if it is no number on some."""

    name: str
    mean: float
    ranks: int
    no_number: tuple[int, ...] = ()  # NaN or infinite on these


class Figures(NamedTuple):
    elapsed_s: float
    num_proc: int
    hosts: int
    ranks: tuple[RankFigures, ...] = ()
    steps: int = 0
    steps_per_s: float | None = None
    # For how long no rank has made a step, where that is worth saying; else 0.
    still_s: float = 0.0
    step: int | None = None  # the script's own number of it
    values: tuple[Value, ...] = ()
    verdicts: tuple[str, ...] = ()
    troubles: tuple[str, ...] = ()
    has_pulses: bool = False


def figures_of(course: Course, now: float, judged: Verdicts) -> Figures:
    """judged: what `judge` says of the ranks' records."""
    ranks = course.ranks
    recent = {rank: known for rank in range(ranks.num_proc) if (known := course.pulses.of(rank))}
    steps = {rank: step for rank, known in recent.items() if (step := _step_of(known))}
    parts = _parts(steps, judged.communication_s)
    last = [known.last for known in recent.values()]
    rates = [rate for known in recent.values() if (rate := _rate(known)) is not None]
    running = [recent[rank] for rank in recent if rank not in ranks.endings]
    still_s = _still_s(running, parts, now, ranks.num_proc)
    return Figures(
        elapsed_s=now - course.begin,
        num_proc=ranks.num_proc,
        hosts=len(course.command.shares),
        ranks=tuple(
            RankFigures(rank, host, _state(course, rank), parts.get(rank))
            for host, theirs in ranks.by_host().items()
            for rank in theirs
        ),
        steps=int(max((pulse.steps for pulse in last), default=0)),
        steps_per_s=0.0 if still_s else median(rates) if rates else None,
        still_s=still_s,
        step=max((int(pulse.step) for pulse in last if pulse.step is not None), default=None),
        values=tuple(_values({rank: known.last for rank, known in recent.items()})),
        verdicts=judged.texts,
        troubles=tuple(_troubles(course, now)),
        has_pulses=bool(recent),
    )


class _Step(NamedTuple):
    seconds: float
    waited: float
    data: float


def _step_of(recent: Recent) -> _Step | None:
    """The mean of the last steps; None before the second one."""
    last, before = recent.last, recent.before
    if last.steps <= before.steps:  # the only pulse, or no step since: all of them
        before = Pulse(0.0, 1.0, 0.0, 0.0, 0.0)
    count = last.steps - before.steps
    if count <= 0:
        return None
    parts = (last.seconds - before.seconds, last.waited - before.waited, last.data - before.data)
    return _Step(*(max(0.0, seconds) / count for seconds in parts))


def _parts(steps: Mapping[int, _Step], communication_s: Mapping[int, float]) -> dict[int, Parts]:
    """communication_s: of a step, by rank, where the ranks' records tell it; else what the rank
    that waits least waits is no more than that."""
    least = min((step.waited for step in steps.values()), default=0.0)
    found = {}
    for rank, step in steps.items():
        data = min(step.data, step.seconds)
        waited = min(step.waited, step.seconds - data)
        communication = min(waited, communication_s.get(rank, least))
        computing = step.seconds - data - waited
        found[rank] = Parts(computing, data, waited - communication, communication)
    return found


def _rate(recent: Recent) -> float | None:
    """Steps per second: the optimizer's, or those that the script counts."""
    last, before = recent.last, recent.before
    if last.steps > before.steps and last.seconds > before.seconds:
        return (last.steps - before.steps) / (last.seconds - before.seconds)
    if last.steps < 2 and last.step is not None and before.step is not None:
        return (last.step - before.step) / (last.at - before.at) if last.at > before.at else None
    return 1 / step.seconds if (step := _step_of(recent)) and step.seconds else None


def _still_s(
    running: Iterable[Recent], parts: Mapping[int, Parts], now: float, num_proc: int
) -> float:
    # (A script that reports values and no step is not one that stands still.)
    of_steps = (known for known in running if known.last.steps or known.last.step is not None)
    moved_at = max((known.moved_at for known in of_steps), default=now)
    step_s = median(each.step_s for each in parts.values()) if parts else 0.0
    still_s = now - moved_at
    return still_s if still_s > max(STILL_S, _STILL_STEPS * step_s + every_s(num_proc)) else 0.0


def _state(course: Course, rank: int) -> str:
    ranks = course.ranks
    if (how := ranks.endings.get(rank)) is not None:
        if how == "code 0" or how.startswith("asked "):
            return "ended"
        return f"failed: {how}" if how.startswith(("code ", "signal ")) else "failed"
    if rank in ranks.lost:
        return "lost"
    return "" if rank in ranks.started else "not started"


def _values(pulses: Mapping[int, Pulse]) -> Iterable[Value]:
    ordered = list(dict.fromkeys(name for pulse in pulses.values() for name in pulse.values))
    for name in sorted(ordered, key=lambda each: "loss" not in each.lower()):
        given = {rank: pulse.values[name] for rank, pulse in pulses.items() if name in pulse.values}
        sound = [value for value in given.values() if math.isfinite(value)]
        odd = tuple(sorted(rank for rank, value in given.items() if not math.isfinite(value)))
        yield Value(name, _mean(sound), len(given), odd)


def _mean(values: Sequence[float]) -> float:
    """Also of values whose sum is too large for a float."""
    return math.fsum(value / len(values) for value in values) if values else math.nan


def _troubles(course: Course, now: float) -> Iterable[str]:
    ranks, quiet = course.ranks, course.hosts.quiet.since
    if quiet:
        silent_s = now - max(quiet.values())
        yield f"no sign of life of {names(sorted(quiet))} for {silent_s:.0f} s"
    if ranks.lost:
        lost = {course.command.host_of(rank) for rank in ranks.lost}
        yield f"lost: {names(sorted(lost))}"
    if not ranks.have_all_started:
        yield f"{len(ranks.started)} of {ranks.num_proc} ranks have started"
    if course.ending.has_begun:
        left = len(ranks.awaited)
        are = "1 rank still runs" if left == 1 else f"{left} ranks still run"
        yield f"the job is being ended: {are}"
