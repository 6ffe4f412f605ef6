"""Tells hvdrun every two seconds how far this rank is, where `hvdrun --monitor` shows it.

Nobody asks the rank: it tells at the end of a step, or as the script reports values.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from hvdlite.world.telling import launcher_link
from hvdlite.world.world import World
from hvdrun.for_hvdlite import Pulse, encode_pulse, notes, pulse_every_s

Number = float | torch.Tensor


class Pulses:
    """`progress` gives what a pulse has of the steps: see `Summary.progress`."""

    def __init__(self, size: int, progress: Callable[[], Mapping[str, float]]) -> None:
        self._progress = progress
        self._every_s = pulse_every_s(size)
        self._tell_at = 0.0
        self.step: float | None = None
        # A tensor on a device is asked for its number only when a pulse is sent: that waits for
        # what the device has to do.
        self.values: dict[str, Number] = {}

    def tell_if_due(self) -> None:
        now = time.monotonic()
        if now >= self._tell_at:
            self._tell_at = now + self._every_s
            self.tell(now)

    def tell(self, now: float) -> None:
        tensors = [value for value in self.values.values() if isinstance(value, torch.Tensor)]
        if any(each.is_cuda for each in tensors) and torch.cuda.is_current_stream_capturing():
            return  # a graph, in which nothing may be read
        values = {name: float(value) for name, value in self.values.items()}
        pulse = Pulse(now, step=self.step, values=values, **self._progress())
        launcher_link.tell(notes.PULSE, encode_pulse(pulse))


_pulses: Pulses | None = None


def current() -> Pulses | None:
    """None: hvdrun does not show this rank."""
    return _pulses


def begin(active: World, progress: Callable[[], Mapping[str, float]]) -> None:
    """Tells from now on, and once more as the rank leaves this world."""
    global _pulses
    pulses = _pulses = Pulses(active.size, progress)

    def leave() -> None:
        global _pulses
        if _pulses is pulses:
            _pulses = None
            pulses.tell(time.monotonic())

    active.before_leaving.append(leave)


def step_ended() -> None:
    if _pulses is not None:
        _pulses.tell_if_due()
