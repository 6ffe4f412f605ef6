"""What the ranks write, line by line, with the rank in front.

A line is written whole. Rank 0's unfinished line is shown once it pauses, as it may be a prompt; if
another rank speaks meanwhile, it is shown anew after that (on a terminal) or goes on below (in a
file).

Progress bars draw themselves anew after a carriage return. On a terminal rank 0's does so, and of
the others' is shown how they ended. In a file a bar is a line now and then, and at its end.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

from .folding import Folding, spans
from .times import stamp

_END = re.compile(rb"\r\n|\n|\r")
_OLD_STATES = re.compile(rb"[^\n]*\r(?!\n)")
_ERASE = b"\r\x1b[K"
# One after the other for the ranks; red is for errors.
_COLOURS = (b"\x1b[36m", b"\x1b[33m", b"\x1b[32m", b"\x1b[35m", b"\x1b[34m")
_PLAIN = b"\x1b[0m"
TAIL_BYTES = 1 << 14
UNFINISHED_BYTES = 1 << 20  # more than this is not waited for
BAR_EVERY_S = 10.0  # in a file
PAUSE_S = {True: 0.05, False: 0.2}  # before a prompt is shown: on a terminal, in a file


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
    """`write(fd, data)` gets what is to be shown on 1 and 2, in whole lines; `keep(rank, fd, data)`
    all that the ranks write. `terminals` says which of 1 and 2 are some."""

    def __init__(
        self,
        num_proc: int,
        write: Callable[[int, bytes], None],
        keep: Callable[[int, int, bytes], None] | None = None,
        terminals: Collection[int] = (),
        place: dict[int, object] | None = None,
        coloured: bool = False,
        timestamps: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.write = write
        self.keep = keep
        self.terminals = terminals
        self.place = place or {1: 1, 2: 2}
        self.coloured = coloured
        self.timestamps = timestamps
        self.clock = clock
        self.tagged = num_proc > 1
        self.folding = Folding(num_proc) if self.tagged else None
        self.rest: dict[tuple[int, int], bytes] = defaultdict(bytes)  # (rank, fd) → unfinished
        self.changed: dict[int, float] = {}  # fd → when rank 0 wrote to it last
        self.bars: dict[tuple[int, int], float] = {}  # in a file: when a bar was shown last
        self.tails: dict[int, bytes] = defaultdict(bytes)  # the last that a rank wrote to stderr
        self.open: dict[object, tuple[int, int, int]] = {}  # place → rank, fd, bytes shown
        self.at_line_start: dict[object, bool] = defaultdict(lambda: True)

    def feed(self, rank: int, fd: int, data: bytes) -> None:
        if self.keep is not None:
            self.keep(rank, fd, data)
        if fd == 2:
            self.tails[rank] = (self.tails[rank] + data)[-TAIL_BYTES:]
            if self.folding is not None:
                now = self.clock()
                data = self.folding.hold(rank, data, now)
                self._show_held(self.folding.due(now))
        if data:
            self._show(rank, fd, data)

    def wait_s(self) -> float | None:
        """How long until `tick` has something to do, if nothing more is written."""
        now = self.clock()
        waits = [self.folding.wait_s(now)] if self.folding is not None else []
        for fd in self._unshown():
            waits.append(self.changed[fd] + PAUSE_S[fd in self.terminals] - now)
        return min((max(0.0, wait) for wait in waits if wait is not None), default=None)

    def tick(self) -> None:
        """Shows what has waited for long enough: tracebacks, what rank 0 has not finished."""
        now = self.clock()
        if self.folding is not None:
            self._show_held(self.folding.due(now))
        for fd in self._unshown():
            if now - self.changed[fd] >= PAUSE_S[fd in self.terminals]:
                already = self._claim(0, fd)
                text = self.rest[0, fd]
                self.write(fd, self._tag(0, fd, text, already))
                self.open[self.place[fd]] = (0, fd, len(text))

    def ending(self) -> None:
        """The job is being ended: what its ranks say to that is shown at the end, folded."""
        if self.folding is not None:
            self.folding.until_end = True

    def finish(self) -> None:
        """The last lines of all ranks, ended; a report can follow."""
        if self.folding is not None:
            self._show_held(self.folding.everything())
        for rank, fd in list(self.rest):
            self._end_line(rank, fd)
        for fd in (1, 2):
            if not self.at_line_start[self.place[fd]]:
                self.write(fd, b"\n")
                self.at_line_start[self.place[fd]] = True

    def say(self, text: str) -> None:
        """A line of hvdrun's own."""
        self._claim(-1, 2)
        if not self.at_line_start[self.place[2]]:  # a single rank's, as it came
            self.write(2, b"\n")
            self.at_line_start[self.place[2]] = True
        self.write(2, text.encode(errors="replace") + b"\n")

    def _show(self, rank: int, fd: int, data: bytes) -> None:
        if not self.tagged and not self.timestamps:
            self.write(fd, data)
            self.at_line_start[self.place[fd]] = data.endswith(b"\n")
            return
        if rank == 0:
            self.changed[fd] = self.clock()
        buffer = self.rest[rank, fd] + data
        if b"\r" in buffer:
            done, rest = self._drawn(rank, fd, buffer)
        else:
            cut = buffer.rfind(b"\n") + 1
            done, rest = buffer[:cut], buffer[cut:]
        if len(rest) > UNFINISHED_BYTES:
            done, rest = done + rest, b""
        already = self._claim(rank, fd) if done else 0
        self.rest[rank, fd] = rest
        if done:
            self.write(fd, self._tag(rank, fd, done, already))
            if not done.endswith((b"\n", b"\r")):
                self.write(fd, b"\n")

    def _drawn(self, rank: int, fd: int, buffer: bytes) -> tuple[bytes, bytes]:
        """What is to be shown of a text with carriage returns, and what remains to be seen."""
        if rank == 0 and fd in self.terminals:
            # A carriage return at the very end may be half of "\r\n".
            cut = max(buffer.rfind(b"\n"), buffer.rfind(b"\r", 0, -1)) + 1
            return buffer[:cut], buffer[cut:]
        cut = buffer.rfind(b"\n") + 1
        done, rest = _OLD_STATES.sub(b"", buffer[:cut]), buffer[cut:]
        bar = (rank, fd)
        if done:
            self.bars.pop(bar, None)
        if b"\r" in rest:
            now = self.clock()
            # Its carriage return stays in front, as the mark of a bar.
            rest = rest[max(0, rest.rfind(b"\r", 0, -1)) :]
            if now - self.bars.setdefault(bar, now) >= BAR_EVERY_S and fd not in self.terminals:
                self.bars[bar] = now
                done += rest.strip(b"\r") + b"\n"
        return done, rest

    def _show_held(self, held: Sequence[tuple[list[int], bytes]]) -> None:
        for ranks, text in held:
            for rank in ranks:
                self._end_line(rank, 2)
            if len(ranks) == 1:
                self._show(ranks[0], 2, text)
                continue
            self._claim(-1, 2)
            tag = self._mark(f"ranks {spans(ranks)}", ranks[0], 2)
            lines = _OLD_STATES.sub(b"", text).removesuffix(b"\n").split(b"\n")
            self.write(2, b"".join(tag + line + b"\n" for line in lines))

    def _end_line(self, rank: int, fd: int) -> None:
        text = self.rest[rank, fd]
        if rank or fd not in self.terminals:
            text = text.strip(b"\r")
        if text:
            already = self._claim(rank, fd)
            self.write(fd, self._tag(rank, fd, text, already) + b"\n")
        self.rest[rank, fd] = b""

    def _unshown(self) -> list[int]:
        """Where rank 0 has something unfinished that is not shown. In a file a bar is not."""
        return [
            fd
            for fd in (1, 2)
            if (text := self.rest.get((0, fd)))
            and self.open.get(self.place[fd]) != (0, fd, len(text))
            and (fd in self.terminals or b"\r" not in text)
        ]

    def _claim(self, rank: int, fd: int) -> int:
        """Makes the place ready for a line; returns how much of it stands there already."""
        place = self.place[fd]
        holder = self.open.pop(place, None)
        if holder is None:
            return 0
        if holder[:2] == (rank, fd):
            return holder[2]
        if holder[1] in self.terminals:
            self.write(holder[1], _ERASE)
        else:
            self.write(holder[1], b"\n")
            # What stands there is not repeated.
            key = holder[0], holder[1]
            self.rest[key] = self.rest[key][holder[2] :]
        return 0

    def _mark(self, name: str, rank: int, fd: int) -> bytes:
        """What stands in front of a line."""
        mark = b""
        if self.tagged:
            mark = f"[{name}] ".encode()
            if self.coloured and fd in self.terminals:
                mark = _COLOURS[rank % len(_COLOURS)] + mark + _PLAIN
        if self.timestamps:
            mark = stamp() + mark
        return mark

    def _tag(self, rank: int, fd: int, text: bytes, already: int) -> bytes:
        """The text with the rank before each line; `already` bytes of it have been shown."""
        tag = self._mark(str(rank), rank, fd)
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
