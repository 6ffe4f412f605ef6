"""Puts the time in front of lines."""

from __future__ import annotations

from datetime import datetime


def stamp() -> bytes:
    """As in `2026-11-21 20:48:31.123 `."""
    return f"{datetime.now().isoformat(' ', 'milliseconds')} ".encode()


class Stamped:
    """Adds the time to each line of each rank and stream."""

    def __init__(self) -> None:
        self._in_a_line: set[tuple[int, int]] = set()

    def __call__(self, rank: int, fd: int, data: bytes) -> bytes:
        stream, time = (rank, fd), stamp()
        begin = b"" if stream in self._in_a_line else time
        if data.endswith(b"\n"):
            self._in_a_line.discard(stream)
        else:
            self._in_a_line.add(stream)
        return begin + data[:-1].replace(b"\n", b"\n" + time) + data[-1:]
