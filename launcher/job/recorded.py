"""The ranks' last operations, as their keepers have sent them. No clock."""

from __future__ import annotations

from collections.abc import Iterator

from hvdrun.job.ranks import Ranks
from hvdrun.machine.box_layout import LARGEST_BYTES
from hvdrun.reports import last_operations
from hvdrun.reports.black_box import Box, lines_of, read_box


class Recorded:
    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.packed: dict[int, bytes] = {}
        self.read: dict[int, Box] | None = None

    def on_operations(self, rank: int, data: bytes) -> None:
        if 0 <= rank < self.ranks.num_proc and len(data) <= LARGEST_BYTES:
            self.packed[rank] = data
            self.read = None

    def rows(self) -> dict[int, Iterator[str]]:
        """Of these ranks: an operation per line."""
        return {rank: lines_of(box) for rank, box in self.boxes().items()}

    def boxes(self) -> dict[int, Box]:
        """Of the ranks that have sent one."""
        if self.read is None:
            boxes = ((rank, read_box(data)) for rank, data in sorted(self.packed.items()))
            self.read = {rank: box for rank, box in boxes if box is not None}
        return self.read

    def report(self) -> tuple[str, ...]:
        """What the report on a job that has failed says of them, if anything."""
        lines = last_operations.report(self.boxes(), self._left())
        return (f"hvdrun: {lines[0]}", *lines[1:]) if lines else ()

    def _left(self) -> dict[int, str]:
        return dict.fromkeys(self.ranks.well, "ended with exit code 0")

    def summary(self) -> list[str]:
        return last_operations.summary(self.boxes(), self._left())
