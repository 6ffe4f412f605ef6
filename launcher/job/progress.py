"""What the ranks have told of their training: how far each is, by its pulses, and what it has
measured, by its records. No clock: times are seconds by hvdrun's, as hosts' clocks need not agree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from hvdrun import pulse, records
from hvdrun.plan.command import Command
from hvdrun.pulse import Pulse
from hvdrun.records import TELLS_AT_LEAST_EVERY_S, Record
from hvdrun.reports import figures, prometheus
from hvdrun.reports.late import so_far

# What is shown as being so now is the mean of this time, and of at least one step.
WINDOW_S = 12.0
_MOST = 16


class Recent(NamedTuple):
    """The rank's last pulse, and one from before; the same one if there is no other.
    moved_at: when the rank was last seen to have made a step, or to report a new number of one."""

    last: Pulse
    before: Pulse
    moved_at: float


class Pulses:
    def __init__(self) -> None:
        self.by_rank: dict[int, deque[tuple[float, Pulse]]] = {}
        self.moved_at: dict[int, float] = {}

    def add(self, now: float, rank: int, data: bytes) -> None:
        told = pulse.parse(data)
        if told is None:
            return
        known = self.by_rank.setdefault(rank, deque(maxlen=_MOST))
        before = known[-1][1] if known else None
        # (Also while the optimizer that is shown makes no step, but another one does.)
        if before is None or _place(before, of_all=True) != _place(told, of_all=True):
            self.moved_at[rank] = now
        # Another process, another world, or another optimizer.
        if before is not None and (
            any(new < old for new, old in zip(told[:3], before[:3], strict=True))
            or told.optimizer != before.optimizer
        ):
            known.clear()
        known.append((now, told))
        # Where steps take long, the one before stays, so that there is a difference.
        while (
            len(known) > 2 and known[1][0] <= now - WINDOW_S and _place(known[1][1]) != _place(told)
        ):
            known.popleft()

    def of(self, rank: int) -> Recent | None:
        known = self.by_rank.get(rank)
        if not known:
            return None
        (_, last), (_, before) = known[-1], known[0]
        return Recent(last, before, self.moved_at[rank])


def _place(told: Pulse, of_all: bool = False) -> tuple[float, float | None]:
    """Changes with each step; of_all: of whichever optimizer."""
    return (told.all_steps if of_all else 0.0) or told.steps, told.step


# A rank tells at the end of a step that is due by then: after the pause and a step, of which some
# take longer than the others.
_STEPS = 2
_DELAY_S = 1.0


class Measured:
    def __init__(self, command: Command) -> None:
        self.command = command
        self.records: dict[int, Record] = {}  # by rank, its latest
        self._at: float | None = None  # when a rank has told of a new step last
        self._at_of: dict[int, float] = {}  # when each rank has told last

    def add(self, now: float, rank: int, data: bytes) -> None:
        """A rank has told this."""
        record, before = records.parse(data), self.records.get(rank)
        if record is None:
            return
        self.records[rank] = record
        self._at_of[rank] = now
        if before is None or _made(record) != _made(before):
            self._at = now

    def age_s(self, now: float) -> float:
        """How long ago the rank has told that has been silent for longest."""
        return max((now - at for at in self._at_of.values()), default=0.0)

    def silent_s(self, now: float | None) -> float | None:
        """For how long no rank has told of a step, as what all have measured is that old. None: not
        for longer than usual, no rank has made steps, or the job has ended (now: None)."""
        steps_s = [_step_s(record) for record in list(self.records.values()) if record.steps > 1]
        if now is None or self._at is None or not steps_s:
            return None
        seconds = now - self._at
        usual_s = TELLS_AT_LEAST_EVERY_S + _STEPS * max(steps_s) + _DELAY_S
        return seconds if seconds > usual_s else None

    # What follows takes `now` as None once the job has ended.

    def so_far(self, now: float) -> str:
        """In words."""
        host_of, silent_s = self.command.host_of, self.silent_s(now)
        return so_far(self.records, self.command.num_proc, host_of, silent_s)

    def figures(self, now: float | None = None) -> str:
        """As JSON."""
        host_of, silent_s = self.command.host_of, self.silent_s(now)
        return figures.as_json(self.records, self.command.num_proc, host_of, silent_s)

    def exposition(self, labels: Mapping[str, object], now: float | None) -> str:
        """In Prometheus' text format, with these labels. Another thread may ask."""
        known, size, silent_s = dict(self.records), self.command.num_proc, self.silent_s(now)
        is_running, host_of = now is not None, self.command.host_of
        return prometheus.text_of(known, host_of, labels, size, is_running, silent_s)


def _made(record: Record) -> tuple[float, ...]:
    """Changes with each step, whichever optimizer makes it."""
    recent = record.recent
    return (record.steps, record.seconds, *((recent.steps, recent.seconds) if recent else ()))


def _step_s(record: Record) -> float:
    latest = record.recent if record.recent and record.recent.steps > 1 else record
    return latest.seconds / (latest.steps - 1)
