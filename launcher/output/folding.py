"""Tracebacks that are the same on many ranks, folded into one. Pure: the time is an argument.

What a rank writes to stderr from a traceback on is held for a moment, as others may say the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

HEADER = b"Traceback (most recent call last):"
HOLD_S = 0.5
HOLD_BYTES = 1 << 16  # a rank that says more than that is not held


@dataclass
class _Held:
    text: bytearray
    since: float


class Folding:
    """`hold` takes what ranks write and returns what need not wait; `due` gives the rest."""

    def __init__(self, num_proc: int) -> None:
        self.num_proc = num_proc
        self.until_end = False  # the job is being ended: all that is said now is held until then
        self.held: dict[int, _Held] = {}

    def hold(self, rank: int, data: bytes, now: float) -> bytes:
        """What can be shown now: what stands before a traceback."""
        known = self.held.get(rank)
        if known is not None:
            known.text += data
            if len(known.text) < len(HEADER) and not HEADER.startswith(known.text):
                return bytes(self.held.pop(rank).text)  # it only looked like one
            return b""
        begin = data.find(HEADER)
        if begin < 0:
            begin = len(data) - _cut_header(data)
        if begin < len(data):
            self.held[rank] = _Held(bytearray(data[begin:]), now)
        return data[:begin]

    def wait_s(self, now: float) -> float | None:
        """How long until something is due."""
        if not self.held or self.until_end:
            return None
        return max(0.0, min(held.since for held in self.held.values()) + HOLD_S - now)

    def due(self, now: float) -> list[tuple[list[int], bytes]]:
        """What has been held for long enough, or is all that the ranks can say: each text with
        the ranks that said it."""
        ready = {
            rank
            for rank, held in self.held.items()
            if (now - held.since >= HOLD_S and not self.until_end) or len(held.text) > HOLD_BYTES
        }
        if len(self.held) == self.num_proc and self._are_complete_and_equal():
            ready = set(self.held)
        return self._take(ready)

    def everything(self) -> list[tuple[list[int], bytes]]:
        return self._take(set(self.held))

    def _are_complete_and_equal(self) -> bool:
        """Asked with each piece that comes: texts are looked at once they are of one size."""
        first, *others = (held.text for held in self.held.values())
        if not first.endswith(b"\n") or any(len(text) != len(first) for text in others):
            return False
        # The last line of a traceback is the first that is not indented.
        end = first.rfind(b"\n", 0, -1)
        return end >= 0 and first[end + 1] != ord(" ") and all(text == first for text in others)

    def _take(self, ready: set[int]) -> list[tuple[list[int], bytes]]:
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
    """The length of the beginning of a header that data ends with."""
    for size in range(min(len(HEADER) - 1, len(data)), 0, -1):
        if data.endswith(HEADER[:size]):
            return size
    return 0


def spans(ranks: Iterable[int]) -> str:
    """'0-3,5' of sorted ranks."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][1] == rank - 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
