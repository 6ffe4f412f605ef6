"""The steps of one optimizer on this rank: how long they took, and what the rank waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hvdlite.observe.links import Traffic, connections_between, sent_between
from hvdlite.observe.samples import Samples
from hvdrun.for_hvdlite import MOST_RECENT, MOST_SAMPLES, RECENT_S, RECENT_STEPS, Record, Sample

# By cgroup: see `throttling`.
Quotas = Mapping[str, tuple[int, int, float | None, float]]
NOTHING = Traffic()


class Reading(NamedTuple):
    """The clocks, in seconds."""

    now: float
    waited: float  # for hvdlite
    data: float  # for a DataLoader
    cpu: float


class Mark(NamedTuple):
    """The end of a step, or another time."""

    step: int
    reading: Reading
    quotas: Quotas
    traffic: Traffic


class Steps:
    """The first step warms up: time counts from its end. `name` and `members` are the same on all
    ranks that make these steps together."""

    def __init__(
        self,
        first: Reading,
        name: str,
        members: Sequence[int],
        quotas: Quotas | None = None,
        traffic: Traffic = NOTHING,
    ) -> None:
        self.count = 1
        self._clocks = first
        # As the clocks, but that in no step more was waited than it took: threads may wait at the
        # same time, and another thread may make the next step.
        self.last = first
        self.first = Mark(1, first, quotas or {}, traffic)
        self.name = name
        self.members = members
        self.latest: Sample | None = None
        # The seconds since whatever optimizer has made the step before, of all steps.
        self.own_s = 0.0
        self._samples = Samples(MOST_SAMPLES)
        self._recent = Samples(MOST_RECENT)
        # The first of them is the end of the step before the recent ones.
        self._marks = deque([self.first])

    @property
    def samples(self) -> list[Sample]:
        return self._samples.kept

    def ended(self, reading: Reading) -> None:
        """One more step has ended."""
        self.count += 1
        clocks, last = self._clocks, self.last
        seconds = reading.now - clocks.now
        waited = min(max(0.0, reading.waited - clocks.waited), seconds)
        data = min(max(0.0, reading.data - clocks.data), seconds)
        self.latest = Sample(self.count, seconds, waited, data)
        self._samples.add(self.latest)
        self._recent.add(self.latest)
        self._clocks = reading
        self.last = Reading(reading.now, last.waited + waited, last.data + data, reading.cpu)

    def mark(self, quotas: Quotas, traffic: Traffic = NOTHING) -> None:
        """Later steps are recent ones at least until the next call. To be called at the end of a
        step, now and then."""
        marks = self._marks
        if self.count == marks[-1].step:
            return
        marks.append(Mark(self.count, self.last, quotas, traffic))
        while (
            self.last.now - marks[1].reading.now >= RECENT_S
            and self.count - marks[1].step >= RECENT_STEPS
        ):
            marks.popleft()
        self._recent.drop(marks[0].step)

    def record(self, quotas: Quotas, traffic: Traffic = NOTHING) -> Record:
        """Of all steps, at least two."""
        recent = None if self._marks[0] is self.first else self.recent(quotas, traffic)
        return self._since(self.first, quotas, traffic, self._samples)._replace(
            steps=self.count, recent=recent
        )

    def recent(self, quotas: Quotas, traffic: Traffic = NOTHING) -> Record | None:
        """Of the recent steps, which may be all, where another optimizer made those before."""
        begin = self._marks[0]
        if self.count == begin.step:
            return None
        return self._since(begin, quotas, traffic, self._recent)

    def _since(self, begin: Mark, quotas: Quotas, traffic: Traffic, samples: Samples) -> Record:
        end = Mark(self.count, self.last, quotas, traffic)
        measured = between(begin, end)
        return measured._replace(steps=self.count - begin.step + 1, samples=tuple(samples.kept))


def between(begin: Mark, end: Mark) -> Record:
    """A record of this time."""
    periods, stopped, cores = _throttled(begin.quotas, end.quotas)
    before, after = begin.reading, end.reading
    return Record(
        steps=0,
        seconds=after.now - before.now,
        waited=after.waited - before.waited,
        # Another thread than the one that trains may ask.
        data=max(0.0, after.data - before.data),
        cpu=after.cpu - before.cpu,
        periods=periods,
        stopped=stopped,
        cores=cores,
        sent=sent_between(begin.traffic, end.traffic),
        connections=connections_between(begin.traffic, end.traffic, end.step - begin.step),
    )


def _throttled(begin: Quotas, end: Quotas) -> tuple[int, int, float]:
    """Of the cgroup that has stopped this process most: its quota's periods, in how many of them it
    was used up, and how many cores it has used; 0: not known."""
    return max(
        (
            (periods - begin[folder][0], stopped - begin[folder][1], _cores(begin[folder], now))
            for folder, now in end.items()
            for periods, stopped in (now[:2],)
            if folder in begin and periods > begin[folder][0]
        ),
        key=lambda found: found[1],
        default=(0, 0, 0.0),
    )


def _cores(
    before: tuple[int, int, float | None, float], now: tuple[int, int, float | None, float]
) -> float:
    """By the time between the two looks at the cgroup, which is not quite that of the steps."""
    (*_, used_before, at_before), (*_, used, at) = before, now
    if used is None or used_before is None or at <= at_before:
        return 0.0
    return max(0.0, used - used_before) / (at - at_before)
