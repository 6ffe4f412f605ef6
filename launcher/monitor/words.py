"""The figures of a job in words; in one line for those who have no terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from hvdrun.monitor.figures import Figures, Value
from hvdrun.output.folding import spans

# After so long a job that tells of no step is told who would.
NO_STEP_S = 60.0
NO_STEP = (
    "no rank has told of a step: DistributedOptimizer tells of its steps, and a script without it"
    " by hvd.report_progress(step=step)"
)


def line(figures: Figures) -> str:
    """All in one line."""
    if not figures.has_pulses:
        return ", ".join([clock(figures.elapsed_s), *figures.troubles, NO_STEP])
    parts = [clock(figures.elapsed_s), *speed(figures), *map(value, figures.values)]
    return ", ".join([*parts, *figures.troubles, *figures.verdicts])


def speed(figures: Figures) -> Iterable[str]:
    """How far the job is, and how fast."""
    if figures.step is not None:
        yield f"step {figures.step}"
    elif figures.steps:
        yield f"{figures.steps} step{'' if figures.steps == 1 else 's'}"
    if figures.still_s:
        yield f"no step for {figures.still_s:.0f} s"
    elif figures.steps_per_s is not None:
        yield f"{number(figures.steps_per_s)} steps/s"


def value(given: Value) -> str:
    """As in `loss 0.31`."""
    if not given.no_number:
        return f"{given.name} {given.mean:.4g}"
    few = f"nan on rank{'s' if len(given.no_number) > 1 else ''} {spans(given.no_number)}"
    sound = given.ranks > len(given.no_number)
    return f"{given.name} {few}" + (f" ({given.mean:.4g} on the others)" if sound else "")


def number(given: float) -> str:
    """With three digits."""
    return f"{given:.{0 if given >= 100 else 1 if given >= 10 else 2}f}"


def clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
