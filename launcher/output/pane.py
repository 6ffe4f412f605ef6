"""The live part of a terminal: some lines that stay at its bottom, below the output, which scrolls.

The output is written as it is, line by line, and then the live part again. A line that has no end
yet, such as a progress bar, is the first of the live part until its end comes.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size

from hvdrun.output.output import targets
from hvdrun.output.terminal import terminals

# Output waits so long for more, so that the live part is drawn no more often.
EVERY_S = 0.05
# While the terminal takes nothing (Ctrl-S), the live part alone is not drawn.
BEHIND_S = 0.5
PIECE_BYTES = 1 << 18
# A longer line is shown in parts.
UNFINISHED_BYTES = 1 << 20
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b.")
_BELOW = b"\x1b[J"  # clears from the cursor on
_PLAIN = b"\x1b[0m"
DEFAULT_SIZE = 80, 24


class Line(NamedTuple):
    text: str  # with colours, and no more columns than `cells`
    cells: int


class Place(NamedTuple):
    """fd: of the terminal that gets the live part; through: those of 1 and 2 that write to it."""

    fd: int
    through: frozenset[int]


def place_of(environ: Mapping[str, str]) -> Place | None:
    """None: no terminal shows a live part, or another program draws on it."""
    shown = terminals()
    if not shown or environ.get("TERM", "dumb") == "dumb":
        return None
    for fd in {1, 2} - shown:
        kind = os.fstat(fd).st_mode
        # What reads a pipe may write to the terminal (less, tee).
        if not (stat.S_ISREG(kind) or stat.S_ISCHR(kind)):
            return None
    fd = 2 if 2 in shown else 1
    if not is_in_front(fd):
        return None
    known = targets()
    return Place(fd, frozenset(each for each in shown if known[each] == known[fd]))


def is_in_front(fd: int) -> bool:
    """Whether this process may use the terminal: it is not in the background there."""
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:  # not this session's
        return True


def size_of(fd: int) -> tuple[int, int]:
    """Columns and rows."""
    try:
        columns, rows = os.get_terminal_size(fd)
    except OSError:
        return DEFAULT_SIZE
    return columns or DEFAULT_SIZE[0], rows or DEFAULT_SIZE[1]


class Pane:
    """`write` gets what the terminal is to get, and returns at once; `is_behind` says that it has
    not written all of it; `columns` gives the terminal's width now."""

    def __init__(
        self,
        write: Callable[[bytes], None],
        is_behind: Callable[[], bool],
        columns: Callable[[], int],
    ) -> None:
        self._write = write
        self._is_behind = is_behind
        self._columns = columns
        self._lines: Sequence[Line] = ()
        self._drawn: list[int] = []  # the cells of each line of the live part on the terminal
        self._changed = False
        self._pending = bytearray()
        self._rest = b""  # of a line whose end has not come
        self._next_at = float("-inf")

    def feed(self, data: bytes) -> None:
        """Output."""
        self._pending += data
        if len(self._pending) > PIECE_BYTES:
            self._draw()

    def show(self, lines: Sequence[Line]) -> None:
        """The live part from now on."""
        self._lines, self._changed = lines, True

    def leave(self) -> None:
        """Another program has the terminal, and its lines are at the bottom: the live part stays
        where it is, and none is drawn until the next `show`."""
        self._lines, self._drawn = (), []

    def wait_s(self, now: float) -> float | None:
        if not (self._pending or self._changed):
            return None
        return max(0.0, self._next_at - now)

    def tick(self, now: float) -> None:
        if not (self._pending or self._changed) or now < self._next_at:
            return
        if not self._pending and self._is_behind():
            self._next_at = now + BEHIND_S
            return
        self._next_at = now + EVERY_S
        self._draw()

    def close(self) -> None:
        """Takes the live part away; what comes next is written as it is."""
        self._lines = ()
        data = self._erase() + self._rest + bytes(self._pending)
        self._rest = b""
        self._pending.clear()
        self._drawn = []
        if data:
            self._write(data)

    def _draw(self) -> None:
        width = max(1, self._columns() - 1)
        text = self._rest + bytes(self._pending)
        self._pending.clear()
        self._changed = False
        cut = text.rfind(b"\n") + 1
        done, rest = text[:cut], text[cut:]
        if len(rest) > UNFINISHED_BYTES:
            done, rest = text + b"\n", b""
        self._rest = rest[rest.rfind(b"\r", 0, -1) + 1 :]
        before = self._erase()
        lines = list(self._lines)
        if unfinished := _as_line(self._rest, width):
            lines.insert(0, unfinished)
        self._drawn = [line.cells for line in lines]
        shown = "\n".join(line.text for line in lines).encode(errors="replace")
        self._write(before + done + (_PLAIN if done else b"") + shown)

    def _erase(self) -> bytes:
        if not self._drawn:
            return b""
        columns = max(1, self._columns())
        # In a terminal that has become narrower, long lines may have become several.
        rows = sum(max(1, -(-cells // columns)) for cells in self._drawn)
        up = b"\x1b[%dA" % (rows - 1) if rows > 1 else b""
        return b"\r" + up + _BELOW


def _as_line(rest: bytes, width: int) -> Line | None:
    """The end of an unfinished line, as far as it can be shown."""
    text = _ESCAPES.sub("", rest[-8 * width - 256 :].decode(errors="replace"))
    text = "".join(c for c in text.expandtabs() if c.isprintable())
    if not text:
        return None
    if cell_len(text) > width:
        text = set_cell_size(text, width)
    return Line(text, cell_len(text))
