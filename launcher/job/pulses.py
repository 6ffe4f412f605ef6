"""How far each rank is, by the pulses that it has sent lately. No clock."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from hvdrun.pulse import Pulse, parse

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
        pulse = parse(data)
        if pulse is None:
            return
        known = self.by_rank.setdefault(rank, deque(maxlen=_MOST))
        before = known[-1][1] if known else None
        # (Also while the optimizer that is shown makes no step, but another one does.)
        if before is None or _has_moved(before, pulse):
            self.moved_at[rank] = now
        # Another process, another world, or another optimizer.
        if before is not None and (
            any(new < old for new, old in zip(pulse[:3], before[:3], strict=True))
            or pulse.optimizer != before.optimizer
        ):
            known.clear()
        known.append((now, pulse))
        # Where steps take long, the one before stays, so that there is a difference.
        while len(known) > 2 and known[1][0] <= now - WINDOW_S and _moved(known[1][1], pulse):
            known.popleft()

    def of(self, rank: int) -> Recent | None:
        known = self.by_rank.get(rank)
        if not known:
            return None
        (_, last), (_, before) = known[-1], known[0]
        return Recent(last, before, self.moved_at[rank])


def _place(pulse: Pulse) -> tuple[float, float | None]:
    return pulse.steps, pulse.step


def _moved(before: Pulse, last: Pulse) -> bool:
    return _place(before) != _place(last)


def _has_moved(before: Pulse, last: Pulse) -> bool:
    """Whichever optimizer is shown."""
    places = [(each.all_steps or each.steps, each.step) for each in (before, last)]
    return places[0] != places[1]
