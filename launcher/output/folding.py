"""Folds tracebacks that are the same on many ranks into one. Pure: the time is an argument.

Holds a rank's stderr for a moment, from a traceback on, as other ranks may write the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

HEADER = b"Traceback (most recent call last):"
HOLD_S = 0.5
# The same while the job is being ended: longer than ranks have after a failure. The grace after a
# signal may be much longer, and what ranks write while they save must be seen.
ENDING_HOLD_S = 5.0
HOLD_BYTES = 1 << 16  # a longer text is not held


@dataclass
class _Held:
    text: bytearray
    since: float


class Folding:
    """`hold` gets the ranks' stderr and returns what need not wait; `due` returns the rest."""

    def __init__(self, num_proc: int) -> None:
        self.num_proc = num_proc
        self.hold_s = HOLD_S
        self.held: dict[int, _Held] = {}

    def hold(self, rank: int, data: bytes, now: float) -> bytes:
        """Returns what can be shown now: the text before a traceback."""
        known = self.held.get(rank)
        if known is not None:
            known.text += data
            if len(known.text) < len(HEADER) and not HEADER.startswith(known.text):
                return bytes(self.held.pop(rank).text)  # it only began like one
            return b""
        begin = data.find(HEADER)
        if begin < 0:
            begin = len(data) - _cut_header(data)
        if begin < len(data):
            self.held[rank] = _Held(bytearray(data[begin:]), now)
        return data[:begin]

    def wait_s(self, now: float) -> float | None:
        """How long until something is due."""
        if not self.held:
            return None
        return max(0.0, min(held.since for held in self.held.values()) + self.hold_s - now)

    def due(self, now: float) -> list[tuple[list[int], bytes]]:
        """Removes and returns the texts that were held for long enough, or are the same on all
        ranks: each text with the ranks that wrote it."""
        ready = {
            rank
            for rank, held in self.held.items()
            if now - held.since >= self.hold_s or len(held.text) > HOLD_BYTES
        }
        if len(self.held) == self.num_proc and self._are_complete_and_equal():
            ready = set(self.held)
        return self._remove(ready)

    def everything(self) -> list[tuple[list[int], bytes]]:
        return self._remove(set(self.held))

    def _are_complete_and_equal(self) -> bool:
        """Called for each piece that arrives: compares the texts only if their sizes agree."""
        first, *others = (held.text for held in self.held.values())
        if not first.endswith(b"\n") or any(len(text) != len(first) for text in others):
            return False
        # The last line of a traceback is the first that is not indented.
        end = first.rfind(b"\n", 0, -1)
        return end >= 0 and first[end + 1] != ord(" ") and all(text == first for text in others)

    def _remove(self, ready: set[int]) -> list[tuple[list[int], bytes]]:
        if not ready:
            return []
        texts = {bytes(self.held[rank].text) for rank in ready}
        sizes = {len(text) for text in texts}
        groups: dict[bytes, list[int]] = {}
        for rank in sorted(self.held):
            held = self.held[rank].text
            if len(held) in sizes and (text := bytes(held)) in texts:
                groups.setdefault(text, []).append(rank)
        for rank in [rank for ranks in groups.values() for rank in ranks]:
            del self.held[rank]
        return [(ranks, text) for text, ranks in groups.items()]


def _cut_header(data: bytes) -> int:
    """How many bytes of a header `data` ends with."""
    sizes = range(min(len(HEADER) - 1, len(data)), 0, -1)
    return next((size for size in sizes if data.endswith(HEADER[:size])), 0)


def spans(ranks: Iterable[int]) -> str:
    """Sorted ranks in the form '0-3,5'."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][1] == rank - 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
