"""The summary of this rank's run: its optimizer's steps, and what the rank waited for in them.

hvdrun gets it when the rank leaves, and shows one line for all ranks, and which rank is slow.
Without hvdrun, rank 0 shows its own.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import time
import zlib
from collections.abc import Sequence

from hvdlite.observe import links, loading, program, pulses, waits
from hvdlite.observe.loading import Loading
from hvdlite.observe.steps import Mark, Reading, Steps, between
from hvdlite.observe.waits import Waits
from hvdlite.world.process.exits import is_supervised
from hvdlite.world.telling import launcher_link
from hvdlite.world.world import World
from hvdrun.for_hvdlite import (
    TELLS_AGAIN_AFTER,
    TELLS_AT_LEAST_EVERY_S,
    TELLS_EVERY_S,
    Record,
    Sample,
    encode,
    notes,
    of_world,
    summary_of,
    throttling,
)


class Summary:
    def __init__(self, counted: Waits, loading: Loading) -> None:
        self._counted = counted
        self._loading = loading
        self._pid = os.getpid()
        self._begin = Mark(0, self._read(), throttling(), links.read())
        self._steps: dict[int, Steps] = {}
        self._shown_steps = -1
        # Of the world that hvdrun is told about; None: there is none.
        self.place: tuple[int, int] | None = None
        self._tell_at = 0.0

    def _read(self) -> Reading:
        return Reading(
            time.perf_counter(), self._counted.read(), self._loading.read(), time.process_time()
        )

    def step_ended(self, optimizer: int, name: str, members: Sequence[int]) -> None:
        steps = self._steps.get(optimizer)
        if steps is not None:
            reading = self._read()
            steps.ended(reading)
            if self.place is not None and reading.now >= self._tell_at:
                self._tell_meanwhile(reading.now, *self.place)
            return
        quotas, traffic = throttling(), links.read()
        if not self._steps:  # not what the start has cost
            self._begin = self._begin._replace(quotas=quotas)
        self._steps[optimizer] = Steps(self._read(), name, members, quotas, traffic)

    def latest(self) -> Sample | None:
        """The last step of the optimizer with most steps; None before its second one."""
        most = self._most()
        return most.latest if most else None

    def _most(self) -> Steps | None:
        # A list, as another thread may ask while a second optimizer makes its first step.
        return max(list(self._steps.values()), key=lambda steps: steps.count, default=None)

    def progress(self) -> tuple[float, float, float, float]:
        """Of the optimizer with most steps: their number, and from the end of the first one on the
        seconds, and the parts of them that the rank has waited for hvdlite and for data."""
        most = self._most()
        if most is None:
            return 0, 0.0, 0.0, 0.0
        begin, end = most.first.reading, most.last
        data = max(0.0, end.data - begin.data)
        return most.count, end.now - begin.now, end.waited - begin.waited, data

    def record(self, rank: int = 0, size: int = 0) -> Record:
        """Of the optimizer with most steps. Without two steps, the time since `init`."""
        most, quotas, traffic = self._most(), throttling(), links.read()
        if most is None or most.count < 2:
            record = between(self._begin, Mark(0, self._read(), quotas, traffic))
            record = record._replace(steps=most.count if most else 0)
        else:
            record = most.record(quotas, traffic)
        return of_world(
            record,
            rank=rank,
            size=size,
            optimizer=most.name if most else "",
            members=zlib.crc32(repr(list(most.members)).encode()) if most else 0,
        )

    def _tell_meanwhile(self, now: float, rank: int, size: int) -> None:
        passed = now - self._begin.reading.now
        pause_s = max(TELLS_EVERY_S, TELLS_AGAIN_AFTER * passed)
        self._tell_at = now + min(pause_s, TELLS_AT_LEAST_EVERY_S)
        quotas, traffic = throttling(), links.read()
        for steps in self._steps.values():
            steps.mark(quotas, traffic)
        if os.getpid() == self._pid:
            launcher_link.tell(notes.SUMMARY, encode(self.record(rank, size)))

    def tell(self, rank: int, size: int) -> None:
        """Passes the record on. Does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        self.place = None
        record = self.record(rank, size)
        if is_supervised():
            launcher_link.tell(notes.SUMMARY, encode(record))
        elif rank == 0 and record.steps != self._shown_steps:
            # Not again after another world without more steps.
            self._shown_steps = int(record.steps)
            print(f"hvdlite: {summary_of({0: record}, 1)}", file=sys.stderr, flush=True)


_summary: Summary | None = None


def begun() -> Summary:
    """Counts from now on, if it did not before."""
    global _summary
    if _summary is None:
        counted = waits.count_time()
        _summary = Summary(counted, loading.count_time(counted))
    return _summary


def begin(active: World) -> None:
    """Counts from now on, and tells when the rank leaves this world, or its process ends."""
    counted = begun()
    if is_supervised():
        counted.place = active.rank, active.size
    once = functools.cache(functools.partial(counted.tell, active.rank, active.size))
    active.before_leaving.append(once)
    atexit.register(once)


def step_ended(optimizer: int, name: str, members: Sequence[int]) -> None:
    """An optimizer has made a step. optimizer: a number of its own; name, members: the same on the
    ranks that make its steps together."""
    program.step_ended(optimizer, name)
    if _summary is not None:
        links.step_ended()
        _summary.step_ended(optimizer, name, members)
        pulses.step_ended()
