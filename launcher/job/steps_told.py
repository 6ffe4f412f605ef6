"""For how long no rank has told of a step: what the others have measured is that old."""

from __future__ import annotations

from collections.abc import Mapping

from hvdrun.records import TELLS_AT_LEAST_EVERY_S, Record

# A rank tells at the end of a step that is due by then: after the pause and a step, of which some
# take longer than the others.
_STEPS = 2
_DELAY_S = 1.0


class StepsTold:
    """Times are seconds by hvdrun's clock: hosts' clocks need not agree."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._at_of: dict[int, float] = {}

    def add(self, now: float, rank: int, before: Record | None, record: Record) -> None:
        """A rank has told this. before: what it told before that."""
        self._at_of[rank] = now
        if before is None or _made(record) != _made(before):
            self._at = now

    def age_s(self, now: float) -> float:
        """How long ago the rank has told that has been silent for longest."""
        return max((now - at for at in self._at_of.values()), default=0.0)

    def silent_s(self, now: float, records: Mapping[int, Record]) -> float | None:
        """None: not for longer than usual, or no rank has made steps. records: what each rank told
        last."""
        steps_s = [_step_s(record) for record in records.values() if record.steps > 1]
        if self._at is None or not steps_s:
            return None
        seconds = now - self._at
        usual_s = TELLS_AT_LEAST_EVERY_S + _STEPS * max(steps_s) + _DELAY_S
        return seconds if seconds > usual_s else None


def _made(record: Record) -> tuple[float, ...]:
    """Changes with each step, whichever optimizer makes it."""
    recent = record.recent
    return (record.steps, record.seconds, *((recent.steps, recent.seconds) if recent else ()))


def _step_s(record: Record) -> float:
    latest = record.recent if record.recent and record.recent.steps > 1 else record
    return latest.seconds / (latest.steps - 1)
