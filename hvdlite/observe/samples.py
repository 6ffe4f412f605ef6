"""Some of the steps of one optimizer, the same ones on every rank."""

from __future__ import annotations

from hvdrun.for_hvdlite import Sample

# The golden ratio times 2^32: see `_is_kept`.
_GOLDEN = 0x9E3779B1
# Fewer than this part of the greatest number: more of the steps that follow can be kept. Twice as
# many must fit.
_FEW = 0.45


class Samples:
    """At most so many."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._bits = 0
        self.kept: list[Sample] = []

    def add(self, sample: Sample) -> None:
        if not _is_kept(sample.step, self._bits):
            return
        self.kept.append(sample)
        while len(self.kept) > self._most:
            self._bits += 1
            self.kept = [each for each in self.kept if _is_kept(each.step, self._bits)]

    def drop(self, last: int) -> None:
        """The steps up to this one."""
        self.kept = [each for each in self.kept if each.step > last]
        if self._bits and len(self.kept) < _FEW * self._most:
            self._bits -= 1


def _is_kept(step: int, bits: int) -> bool:
    """Whether this step is one of the samples, of which there are 2^bits times fewer than steps.

    Every rank keeps the same steps, so that their times can be compared, and they come from the
    whole job. Multiples of the golden ratio spread them evenly, yet follow no rhythm that a script
    may have, such as an evaluation every 1000 steps. What is kept with more bits is kept with
    fewer: ranks of which one made more steps have samples in common.
    """
    return not (step * _GOLDEN & 0xFFFFFFFF) >> (32 - bits)
