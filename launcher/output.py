"""What the ranks write, line by line, with the rank in front.

A line is written whole. What ends with a carriage return (a progress bar) is a line too. Rank 0's
unfinished line, a prompt or a bar, is shown once rank 0 pauses; if another rank speaks meanwhile,
it is shown anew after that (on a terminal) or goes on below (in a file).
"""

from __future__ import annotations

import os
import re
import select
import stat
from collections import defaultdict
from collections.abc import Callable

_END = re.compile(rb"\r\n|\n|\r")
_ERASE = b"\r\x1b[K"
TAIL_BYTES = 1 << 14
UNFINISHED_BYTES = 1 << 20  # more than this is not waited for


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # the terminal's other users may have made it non-blocking
            select.select([], [fd], [])


def places() -> dict[int, object]:
    """What stdout and stderr are: the same object where they are one terminal or file."""
    found: dict[int, object] = {}
    for fd in (1, 2):
        try:
            status = os.fstat(fd)
        except OSError:
            found[fd] = None
            continue
        found[fd] = (status.st_dev, status.st_ino, stat.S_IFMT(status.st_mode))
    return found


class Output:
    """`write(fd, data)` gets what is to be shown on 1 and 2, in whole lines."""

    def __init__(
        self,
        tagged: bool,
        write: Callable[[int, bytes], None] = write_all,
        terminal: bool = False,
        place: dict[int, object] | None = None,
    ) -> None:
        self.tagged = tagged
        self.write = write
        self.terminal = terminal
        self.place = place or {1: 1, 2: 2}
        self.rest: dict[tuple[int, int], bytes] = defaultdict(bytes)  # (rank, fd) → unfinished
        self.tails: dict[int, bytes] = defaultdict(bytes)  # the last that a rank wrote to stderr
        self.open: dict[object, tuple[int, int, int]] = {}  # place → rank, fd, bytes shown
        self.at_line_start: dict[object, bool] = defaultdict(lambda: True)

    def feed(self, rank: int, fd: int, data: bytes) -> None:
        if fd == 2:
            self.tails[rank] = (self.tails[rank] + data)[-TAIL_BYTES:]
        if not self.tagged:
            self.write(fd, data)
            self.at_line_start[self.place[fd]] = data.endswith(b"\n")
            return
        buffer = self.rest[rank, fd] + data
        if rank and self.terminal:
            # Its bar would fight with rank 0's: only the last state of a line is shown.
            cut = buffer.rfind(b"\n") + 1
            done = re.sub(rb"[^\n]*\r(?!\n)", b"", buffer[:cut])
            rest = buffer[cut:]
            rest = rest[rest.rfind(b"\r", 0, -1) + 1 :]
        else:
            # A carriage return at the very end may be half of "\r\n".
            cut = max(buffer.rfind(b"\n"), buffer.rfind(b"\r", 0, -1)) + 1
            done, rest = buffer[:cut], buffer[cut:]
        if len(rest) > UNFINISHED_BYTES:
            done, rest = done + rest, b""
        already = self._claim(rank, fd) if done else 0
        self.rest[rank, fd] = rest
        if done:
            self.write(fd, self._tag(rank, done, already))
            if not done.endswith((b"\n", b"\r")):
                self.write(fd, b"\n")

    def waiting(self) -> bool:
        """Is there something that `pause` would show?"""
        return any(
            text and self.open.get(self.place[fd]) != (rank, fd, len(text))
            for (rank, fd), text in self.rest.items()
            if rank == 0
        )

    def pause(self) -> None:
        """Nothing has come for a moment: shows what rank 0 has not finished."""
        for (rank, fd), text in self.rest.items():
            if rank == 0 and text:
                already = self._claim(rank, fd)
                self.write(fd, self._tag(rank, text, already))
                self.open[self.place[fd]] = (rank, fd, len(text))

    def finish(self) -> None:
        """The last lines of all ranks, ended; a report can follow."""
        for rank, fd in list(self.rest):
            text = self.rest[rank, fd]
            if text:
                already = self._claim(rank, fd)
                self.write(fd, self._tag(rank, text, already))
                if not text.endswith(b"\r") or self.terminal:
                    self.write(fd, b"\n")
                self.rest[rank, fd] = b""
        for fd in (1, 2):
            if not self.at_line_start[self.place[fd]]:
                self.write(fd, b"\n")
                self.at_line_start[self.place[fd]] = True

    def say(self, text: str) -> None:
        """A line of hvdrun's own."""
        self._claim(-1, 2)
        self.write(2, text.encode(errors="replace") + b"\n")

    def _claim(self, rank: int, fd: int) -> int:
        """Makes the place ready for a line; returns how much of it stands there already."""
        place = self.place[fd]
        holder = self.open.pop(place, None)
        if holder is None:
            return 0
        if holder[:2] == (rank, fd):
            return holder[2]
        if self.terminal:
            self.write(holder[1], _ERASE)
        else:
            self.write(holder[1], b"\n")
            # What stands there is not repeated.
            key = holder[0], holder[1]
            self.rest[key] = self.rest[key][holder[2] :]
        return 0

    @staticmethod
    def _tag(rank: int, text: bytes, already: int) -> bytes:
        """The text with the rank before each line; `already` bytes of it have been shown."""
        tag = b"[%d] " % rank
        if b"\r" not in text:
            body = text[:-1].replace(b"\n", b"\n" + tag) + text[-1:]
            return body[already:] if already else tag + body
        parts = []
        begin = 0
        for match in [*_END.finditer(text), None]:
            end, stop = (match.start(), match.end()) if match else (len(text), len(text))
            # A lone carriage return begins a bar anew: the tag belongs to what follows.
            if stop > begin:
                bare = end == begin and match is not None and match[0] == b"\r"
                shown = begin == 0 and already
                parts.append(text[already:stop] if shown else b"" if bare else tag)
                if not shown:
                    parts.append(text[begin:stop])
            begin = stop
        return b"".join(parts)


def is_terminal() -> bool:
    return any(os.isatty(fd) for fd in (1, 2))
