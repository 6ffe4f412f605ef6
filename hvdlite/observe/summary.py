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
from collections import deque
from collections.abc import Sequence
from typing import Any

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

# Two optimizers that make their steps in turns, and take about as long, differ by less.
_MUCH_MORE = 1.25


class Summary:
    def __init__(self, counted: Waits, loading: Loading) -> None:
        self._counted = counted
        self._loading = loading
        self._pid = os.getpid()
        self._begin = Mark(0, self._read_all(), throttling(), links.read())
        self._steps: dict[int, Steps] = {}
        # When the last step has ended, of whatever optimizer.
        self._ended_at = 0.0
        # By optimizer, the number of its steps at the last marks, or as another one made its first.
        self._counts: deque[dict[int, int]] = deque(maxlen=2)
        self._shown_steps = -1
        # Of the world that hvdrun is told about; None: there is none.
        self.place: tuple[int, int] | None = None
        self._mark_at = 0.0

    def _read(self) -> Reading:
        """By the thread that trains."""
        return Reading(
            time.perf_counter(),
            self._counted.read_of_step(),
            self._loading.read(),
            time.process_time(),
        )

    def _read_all(self) -> Reading:
        """Where no step tells which thread trains."""
        return self._read()._replace(waited=self._counted.read())

    def step_ended(self, optimizer: int, name: str, members: Sequence[int]) -> None:
        steps = self._steps.get(optimizer)
        if steps is not None:
            reading = self._read()
            steps.ended(reading)
            steps.own_s += reading.now - self._ended_at
            self._ended_at = reading.now
            if reading.now >= self._mark_at:
                self._mark(reading.now)
            return
        # Counted from here on, a new optimizer need not make up for the steps of those before.
        self._counts.extend([self._made()] * 2)
        quotas, traffic = throttling(), links.read()
        if not self._steps:  # not what the start has cost
            self._begin = self._begin._replace(quotas=quotas)
        reading = self._read()
        self._ended_at = reading.now
        self._steps[optimizer] = Steps(reading, name, members, quotas, traffic)

    def _made(self) -> dict[int, int]:
        """By optimizer, the number of its steps."""
        return {optimizer: steps.count for optimizer, steps in self._steps.items()}

    def latest(self) -> Sample | None:
        """The last step of the optimizer with most steps lately; None before its second one."""
        now = self._now()
        return now[1].latest if now else None

    def _now(self) -> tuple[int, Steps] | None:
        """The optimizer with most steps since the last of `_counts` but one, and its key.

        The ranks must choose alike, though they do not ask at the same moment: of two optimizers
        that make their steps in turns, the one that was made first counts."""
        counts = self._counts[0] if self._counts else {}
        found, most = None, 0
        # (A list, as another thread may ask while a second optimizer makes its first step.)
        for optimizer, steps in list(self._steps.items()):
            made = steps.count - counts.get(optimizer, 0)
            if found is None or made > _MUCH_MORE * most + 1:
                found, most = (optimizer, steps), made
        return found

    def _whole(self) -> Steps | None:
        """The optimizer whose steps took most of the time. The ranks must choose alike: see
        `_now`. One with few steps now and then does not count, though its first and its last one
        lie far apart."""
        found = None
        for steps in list(self._steps.values()):
            if found is None or steps.own_s > _MUCH_MORE * found.own_s:
                found = steps
        return found

    def progress(self) -> dict[str, float]:
        """Of the optimizer with most steps lately, what a pulse has of it: the number of its steps,
        and from the end of the first one on the seconds, and the parts of them that the rank has
        waited for hvdlite and for data; which optimizer it is; and the steps of all."""
        now = self._now()
        if now is None:
            return {"steps": 0.0, "seconds": 0.0, "waited": 0.0, "data": 0.0}
        optimizer, steps = now
        begin, end = steps.first.reading, steps.last
        every = list(self._steps)
        return {
            "steps": steps.count,
            "seconds": end.now - begin.now,
            "waited": end.waited - begin.waited,
            "data": end.data - begin.data,
            "optimizer": every.index(optimizer),
            "all_steps": sum(self._steps[each].count for each in every),
        }

    def record(self, rank: int = 0, size: int = 0) -> Record:
        """Of the optimizer whose steps took most of the time, with a recent part of the one with
        most steps lately. Without two steps, the time since `init`."""
        whole, quotas, traffic = self._whole(), throttling(), links.read()
        if whole is None or whole.count < 2:
            record = between(self._begin, Mark(0, self._read_all(), quotas, traffic))
            waited = min(record.waited, record.seconds)  # of several threads at once
            record = record._replace(steps=whole.count if whole else 0, waited=waited)
        else:
            record = whole.record(quotas, traffic)
        record = of_world(record, rank=rank, size=size, **_who(whole))
        now = self._now()
        if now is None or now[1] is whole:
            return record
        recent = now[1].recent(quotas, traffic)
        if recent is not None:
            recent = recent._replace(rank=rank, size=size, **_who(now[1]))
        return record._replace(recent=recent)

    def _mark(self, now: float) -> None:
        """Now and then, at the end of a step. hvdrun is told, too."""
        passed = now - self._begin.reading.now
        pause_s = max(TELLS_EVERY_S, TELLS_AGAIN_AFTER * passed)
        self._mark_at = now + min(pause_s, TELLS_AT_LEAST_EVERY_S)
        quotas, traffic = throttling(), links.read()
        for steps in self._steps.values():
            steps.mark(quotas, traffic)
        self._counts.append(self._made())
        if self.place is not None and os.getpid() == self._pid:
            launcher_link.tell(notes.SUMMARY, encode(self.record(*self.place)))

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


def _who(steps: Steps | None) -> dict[str, Any]:
    """What a record has of whose steps these are."""
    if steps is None:
        return {"optimizer": "", "members": 0}
    members = zlib.crc32(repr(list(steps.members)).encode())
    return {"optimizer": steps.name, "members": members}


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
