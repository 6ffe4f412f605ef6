"""Which ranks wrote the last lines on the screen. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

LINES = 40  # what a reader sees at a glance
BETWEEN = 5  # so many lines of others do not hide what is above them


class Recent:
    def __init__(self) -> None:
        self._owners: deque[Collection[int]] = deque(maxlen=LINES)

    def add(self, ranks: Collection[int], text: bytes) -> None:
        """These ranks' text was shown; no ranks: hvdrun's own, or on stdout."""
        self._owners.extend([ranks] * min(LINES, text.count(b"\n")))

    def end_with(self, rank: int, lines: int) -> bool:
        """Whether the rank's last lines are all there, below at most a few of others."""
        last = list(self._owners)[-(lines + BETWEEN) :]
        return sum(rank in ranks for ranks in last) >= lines
