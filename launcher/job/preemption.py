"""A job that its batch system has told to end: what the ranks have said, and whether it may run
again. No clock."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

# How a rank ended that has left by itself, that hvdrun has ended, or the batch system: Slurm sends
# TERM to the ranks too, and one that is leaving already may die of it.
_IN_ORDER = re.compile(r"(late )?(asked )?code 0|asked signal \d+|signal 15")


class Preemption:
    """`told`: the ranks in which hvd.preempted() has returned True; it does so in all or in none,
    but for those that have joined."""

    def __init__(self) -> None:
        self.told: set[int] = set()

    def is_the_end_of(self, endings: Mapping[int, str]) -> bool:
        """Whether all ranks have saved and left after that, as far as their exit codes show."""
        return bool(self.told) and all(_code(how) == 0 for how in endings.values())

    def failed(self, endings: Mapping[int, str]) -> int | None:
        """The first rank that ended with an error of its own, as while it saved."""
        wrong = (rank for rank in sorted(endings) if not _IN_ORDER.fullmatch(endings[rank]))
        return next(wrong, None)


def _code(how: str) -> int | None:
    kind, _, number = how.rpartition(" ")
    return int(number) if kind.endswith("code") else None


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
