"""The ranks' last operations, as their keepers have sent them. No clock."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from hvdrun.job.ranks import Ranks
from hvdrun.machine.box_layout import LARGEST_BYTES
from hvdrun.reports import last_messages, last_operations
from hvdrun.reports.black_box import Box, lines_of, read_box


class Recorded:
    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.packed: dict[int, bytes] = {}
        self.read: dict[int, Box] | None = None
        self.running: dict[int, bytes] = {}  # of ranks that run, when they were asked last

    def on_operations(self, rank: int, data: bytes, is_running: bool = False) -> None:
        if not 0 <= rank < self.ranks.num_proc or len(data) > LARGEST_BYTES:
            return
        if is_running:
            self.running[rank] = data
        else:
            self.packed[rank] = data
            self.read = None

    def forget_running(self) -> None:
        """The ranks are about to be asked again."""
        self.running = {}

    def take_orders(self, ranks: Collection[int]) -> tuple[str, ...]:
        """If ranks that have just been asked are in different operations, which each of them has
        not called: what each has called since the last operation that all have ended."""
        packed, self.running = self.running, {}
        most = last_operations.most_compared(len(packed))
        boxes = {
            rank: box
            for rank in sorted(set(ranks) & set(packed))
            if (box := read_box(packed[rank], most)) is not None
        }
        lines = last_operations.orders(boxes, self.ranks.num_proc)
        return (f"hvdrun: {lines[0]}", *lines[1:]) if lines else ()

    def rows(self) -> dict[int, Iterator[str]]:
        """Of these ranks: an operation per line. A rank's are read when its lines are asked for,
        since all of a large job would take much memory at once."""
        return {rank: self._rows_of(rank) for rank in self.boxes()}

    def _rows_of(self, rank: int) -> Iterator[str]:
        if (box := read_box(self.packed[rank])) is not None:
            yield from lines_of(box)

    def boxes(self) -> dict[int, Box]:
        """Of the ranks that have sent one: as much as is compared."""
        if self.read is None:
            most = last_operations.most_compared(len(self.packed))
            boxes = ((rank, read_box(data, most)) for rank, data in sorted(self.packed.items()))
            self.read = {rank: box for rank, box in boxes if box is not None}
        return self.read

    def waited_at(self, rank: int) -> str:
        """The script's line from which it has waited for hvdlite last, as 'train.py:12 in main'."""
        box = self.boxes().get(rank)
        if box is None or not box.waited_at:
            return ""
        file, line, function = box.waited_at[0]
        return f"{file}:{line} in {function}"

    def report(self) -> tuple[str, ...]:
        """What the report on a job that has failed says of them, if anything."""
        boxes = self.boxes()
        lines = last_operations.report(boxes, self._left(), self.ranks.num_proc)
        messages = [f"hvdrun: {line}" for line in last_messages.report(boxes)]
        return (*(f"hvdrun: {line}" for line in lines[:1]), *lines[1:], *messages)

    def awaited_by(self, rank: int) -> set[int]:
        """The ranks that have not called an operation in which this one still was."""
        boxes = self.boxes()
        return last_operations.awaited_by(rank, boxes, self.ranks.num_proc) if boxes else set()

    def _left(self) -> dict[int, str]:
        return dict.fromkeys(self.ranks.well, "ended with exit code 0")

    def summary(self) -> list[str]:
        lines = last_operations.summary(self.boxes(), self._left(), self.ranks.num_proc)
        messages = last_messages.report(self.boxes(), last_messages.MOST_IN_FILE)
        return [*lines, *([""] if lines and messages else []), *messages]
