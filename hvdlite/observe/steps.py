"""The steps of one optimizer on this rank: how long they took, and what the rank waited for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hvdrun.for_hvdlite import MOST_SAMPLES, Sample

# The golden ratio times 2^32: see `_is_kept`.
_GOLDEN = 0x9E3779B1


class Reading(NamedTuple):
    """The clocks, in seconds."""

    now: float
    waited: float  # for hvdlite
    data: float  # for a DataLoader
    cpu: float


class Steps:
    """The first step warms up: time counts from its end. `name` and `members` are the same on all
    ranks that make these steps together."""

    def __init__(self, first: Reading, name: str, members: Sequence[int]) -> None:
        self.count = 1
        self.first = self.last = first
        self.name = name
        self.members = members
        self.latest: Sample | None = None
        self.samples: list[Sample] = []
        self._bits = 0

    def ended(self, reading: Reading) -> None:
        """One more step has ended."""
        self.count += 1
        last = self.last
        self.latest = Sample(
            self.count,
            reading.now - last.now,
            reading.waited - last.waited,
            reading.data - last.data,
        )
        if _is_kept(self.count, self._bits):
            self.samples.append(self.latest)
            while len(self.samples) > MOST_SAMPLES:
                self._bits += 1
                self.samples = [each for each in self.samples if _is_kept(each.step, self._bits)]
        self.last = reading


def _is_kept(step: int, bits: int) -> bool:
    """Whether this step is one of the samples, of which there are 2^bits times fewer than steps.

    Every rank keeps the same steps, so that their times can be compared, and they come from the
    whole job. Multiples of the golden ratio spread them evenly, yet follow no rhythm that a script
    may have, such as an evaluation every 1000 steps. What is kept with more bits is kept with
    fewer: ranks of which one made more steps have samples in common.
    """
    return not (step * _GOLDEN & 0xFFFFFFFF) >> (32 - bits)
