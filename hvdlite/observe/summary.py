"""The summary of this rank's run: its optimizer's steps, and how much of them it waited.

hvdrun gets it when the rank leaves, and shows one line for all ranks. Without hvdrun, rank 0 shows
its own.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
import time
from dataclasses import dataclass

from hvdlite.observe import waits
from hvdlite.observe.waits import Waits
from hvdlite.world import launcher_link
from hvdlite.world.exits import is_supervised
from hvdlite.world.world import World
from hvdrun.for_hvdlite import notes, summary_of


@dataclass
class _Steps:
    """Of one optimizer. The first step warms up: time counts from its end."""

    count: int
    first_s: float
    first_waited_s: float
    last_s: float
    last_waited_s: float


class Summary:
    def __init__(self, counted: Waits) -> None:
        self._counted = counted
        self._pid = os.getpid()
        self._begin_s, self._begin_waited_s = time.perf_counter(), counted.read()
        self._steps: dict[int, _Steps] = {}
        self._shown_steps = -1

    def step_ended(self, optimizer: int) -> None:
        now, waited = time.perf_counter(), self._counted.read()
        steps = self._steps.get(optimizer)
        if steps is None:
            self._steps[optimizer] = _Steps(1, now, waited, now, waited)
        else:
            steps.count, steps.last_s, steps.last_waited_s = steps.count + 1, now, waited

    def record(self) -> dict[str, float]:
        """Of the optimizer with most steps: `steps` is their number, `seconds` the time from the
        end of the first to the end of the last, `waited` the part of it in which the rank waited.
        Without two steps, the time since `init`."""
        most = max(self._steps.values(), key=lambda steps: steps.count, default=None)
        if most is None or most.count < 2:
            seconds = time.perf_counter() - self._begin_s
            waited = self._counted.read() - self._begin_waited_s
        else:
            seconds = most.last_s - most.first_s
            waited = most.last_waited_s - most.first_waited_s
        count = most.count if most else 0
        return {"steps": count, "seconds": round(seconds, 6), "waited": round(waited, 6)}

    def tell(self, rank: int) -> None:
        """Passes the record on. Does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        record = self.record()
        if is_supervised():
            launcher_link.tell(notes.SUMMARY, json.dumps(record).encode())
        elif rank == 0 and record["steps"] != self._shown_steps:
            # Not again after another world without more steps.
            self._shown_steps = int(record["steps"])
            print(f"hvdlite: {summary_of({0: record}, 1)}", file=sys.stderr, flush=True)


_summary: Summary | None = None


def begin(active: World) -> None:
    """Counts from now on, and tells when the rank leaves this world, or its process ends."""
    global _summary
    if _summary is None:
        _summary = Summary(waits.count_time())
    once = functools.cache(functools.partial(_summary.tell, active.rank))
    active.before_leaving.append(once)
    atexit.register(once)


def step_ended(optimizer: int) -> None:
    """An optimizer has made a step. optimizer: a number of its own."""
    if _summary is not None:
        _summary.step_ended(optimizer)
