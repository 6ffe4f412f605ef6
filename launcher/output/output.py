"""Shows the ranks' output line by line, with the rank in front.

Lines are written whole. Rank 0's unfinished line is shown once rank 0 pauses, as it may be a
prompt; if another rank writes meanwhile, the line is shown again after that (on a terminal) or goes
on below (in a file).

A progress bar redraws itself after a carriage return. On a terminal, rank 0's bar moves, and the
other ranks' bars are shown in their last state. In a file, a bar becomes a line now and then, and
one at its end.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence

from hvdrun.output.folding import ENDING_HOLD_S, HEADER, Folding, spans
from hvdrun.output.times import stamp

_END = re.compile(rb"\r\n|\n|\r")
# A line, or a state of a bar, with its end. A lone carriage return is no state: it restarts a bar.
_STATE = re.compile(rb"[^\r\n]+(?:\r\n|\n|\r)?|\r?\n")
_ERASE = b"\r\x1b[K"
# The ranks' colours in turn; red is for errors.
_COLOURS = (b"\x1b[36m", b"\x1b[33m", b"\x1b[32m", b"\x1b[35m", b"\x1b[34m")
_PLAIN = b"\x1b[0m"
TAIL_BYTES = 1 << 14
UNFINISHED_BYTES = 1 << 20  # a longer line is shown in parts
BAR_EVERY_S = 10.0  # in a file
RECENT_LINES = 40  # what a reader sees at a glance
BETWEEN = 5  # so many lines of others do not hide what is above them
PAUSE_S = {True: 0.05, False: 0.2}  # before a prompt is shown: on a terminal, in a file


def targets() -> dict[int, object]:
    """Identifies stdout and stderr: equal objects if they are the same terminal or file."""
    found: dict[int, object] = {}
    for fd in (1, 2):
        try:
            status = os.fstat(fd)
        except OSError:
            found[fd] = None
            continue
        found[fd] = (status.st_dev, status.st_ino, stat.S_IFMT(status.st_mode))
    return found


def _last_states(text: bytes) -> bytes:
    """Each line as a terminal shows it after its carriage returns."""
    if b"\r" not in text:
        return text
    # A carriage return at the very end belongs to the line's end.
    return b"\n".join(line[line.rfind(b"\r", 0, -1) + 1 :] for line in text.split(b"\n"))


def _is_bar(rest: bytearray) -> bool:
    return rest.startswith(b"\r") or rest.endswith(b"\r")


class Recent:
    """Which ranks wrote the last lines on the screen."""

    def __init__(self) -> None:
        self._owners: deque[Collection[int]] = deque(maxlen=RECENT_LINES)

    def add(self, ranks: Collection[int], text: bytes) -> None:
        """These ranks' text was shown; no ranks: hvdrun's own, or on stdout."""
        self._owners.extend([ranks] * min(RECENT_LINES, text.count(b"\n")))

    def end_with(self, rank: int, lines: int) -> bool:
        """Whether the rank's last lines are all there, below at most a few of others."""
        last = list(self._owners)[-(lines + BETWEEN) :]
        return sum(rank in ranks for ranks in last) >= lines


class Output:
    """Calls `write(fd, data)` with the text for descriptors 1 and 2, in whole lines, and
    `keep(rank, fd, data)` with all output of the ranks. `terminals`: which of 1 and 2 are one.

    The work is linear in the size of the output, however long the lines are and in whatever pieces
    they arrive: meanwhile hvdrun does not hear the hosts' signs of life.
    """

    def __init__(
        self,
        num_proc: int,
        write: Callable[[int, bytes], None],
        keep: Callable[[int, int, bytes], None] | None = None,
        terminals: Collection[int] = (),
        targets: dict[int, object] | None = None,
        coloured: bool = False,
        timestamps: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.write = write
        self.keep = keep
        self.terminals = terminals
        self.targets = targets or {1: 1, 2: 2}
        self.coloured = coloured
        self.timestamps = timestamps
        self.clock = clock
        self.tagged = num_proc > 1
        self.folding = Folding(num_proc) if self.tagged else None
        # (rank, fd) → unfinished line. It contains a carriage return only as its last byte, and as
        # the first if it is a bar that does not move.
        self.rest: dict[tuple[int, int], bytearray] = defaultdict(bytearray)
        self.changed: dict[int, float] = {}  # fd → when rank 0 last wrote to it
        self.bars: dict[tuple[int, int], float] = {}  # in a file: when a bar was last shown
        self.tails: dict[int, bytes] = defaultdict(bytes)  # rank → the end of its stderr
        self.open: dict[object, tuple[int, int, int]] = {}  # target → rank, fd, bytes shown
        self.at_line_start: dict[object, bool] = defaultdict(lambda: True)
        self.recent = Recent()  # on the target of stderr
        self.on_line: Callable[[str], None] = lambda _: None  # gets what hvdrun says, too

    def feed(self, rank: int, fd: int, data: bytes) -> None:
        if self.keep is not None:
            self.keep(rank, fd, data)
        if fd == 2:
            data = self._without_torchs_mark(rank, data)
            self.tails[rank] = (self.tails[rank] + data)[-TAIL_BYTES:]
            if self.folding is not None:
                data = self.folding.hold(rank, data, self.clock())
        if data:
            self._show(rank, fd, data)
        if fd == 2 and self.folding is not None:
            self._show_held(self.folding.due(self.clock()))

    def _without_torchs_mark(self, rank: int, data: bytes) -> bytes:
        """torch.distributed writes an uncaught exception in one piece, with [rankN]: before each
        line, which hvdrun says itself. With it, no two ranks' tracebacks would be equal."""
        mark = b"[rank%d]: " % rank
        if mark + HEADER not in data:
            return data
        if not self.tails[rank] or self.tails[rank].endswith(b"\n"):
            data = data.removeprefix(mark)
        return data.replace(b"\n" + mark, b"\n").replace(mark + HEADER, HEADER)

    def wait_s(self) -> float | None:
        """How long until `tick` has something to do, if no more output arrives."""
        now = self.clock()
        waits = [self.folding.wait_s(now)] if self.folding is not None else []
        for fd in self._unshown():
            waits.append(self.changed[fd] + PAUSE_S[fd in self.terminals] - now)
        return min((max(0.0, wait) for wait in waits if wait is not None), default=None)

    def tick(self) -> None:
        """Shows what has waited for long enough: tracebacks, and rank 0's unfinished lines."""
        now = self.clock()
        if self.folding is not None:
            self._show_held(self.folding.due(now))
        for fd in self._unshown():
            if now - self.changed[fd] >= PAUSE_S[fd in self.terminals]:
                already = self._claim(0, fd)
                text = bytes(self.rest[0, fd])
                self.write(fd, self._tag(0, fd, text, already))
                self.open[self.targets[fd]] = (0, fd, len(text))

    def ending(self) -> None:
        """The job is ending: many ranks may write the same now, some of them seconds later."""
        if self.folding is not None:
            self.folding.hold_s = ENDING_HOLD_S

    def finish(self, culprit: int | None = None) -> None:
        """Shows and ends the last lines of all ranks, so that a report can follow. The culprit's
        traceback comes last."""
        if self.folding is not None:
            held = self.folding.everything()
            self._show_held(sorted(held, key=lambda each: culprit in each[0]))
        for rank, fd in list(self.rest):
            self._end_line(rank, fd)

    def say(self, text: str) -> None:
        """A line of hvdrun's own."""
        self.on_line(text)
        self._say(text)

    def report(self, lines: Sequence[str], shown: Sequence[str]) -> None:
        """How the job ended: `shown` leaves out what stands just above it here."""
        for line in lines:
            self.on_line(line)
        for line in shown:
            self._say(line)

    def _say(self, text: str) -> None:
        self._claim(-1, 2)
        if not self.at_line_start[self.targets[2]]:  # a single rank's output is shown as it comes
            self.write(2, b"\n")
            self.at_line_start[self.targets[2]] = True
        self.write(2, text.encode(errors="replace") + b"\n")
        self._remember((), 2, b"\n")

    def _remember(self, ranks: Collection[int], fd: int, text: bytes) -> None:
        if self.targets[fd] == self.targets[2]:
            self.recent.add(ranks if fd == 2 else (), text)

    def _show(self, rank: int, fd: int, data: bytes) -> None:
        if not self.tagged and not self.timestamps:
            self.write(fd, data)
            self.at_line_start[self.targets[fd]] = data.endswith(b"\n")
            return
        if rank == 0:
            self.changed[fd] = self.clock()
        done = self._finished(rank, fd, data)
        rest = self.rest[rank, fd]
        if len(rest) > UNFINISHED_BYTES:
            done += bytes(rest) if self._moves(rank, fd) else rest.strip(b"\r")
            rest.clear()
        if done:
            already = self._claim(rank, fd)
            self.write(fd, self._tag(rank, fd, done, already))
            self._remember((rank,), fd, done)
            if not done.endswith((b"\n", b"\r")):
                self.write(fd, b"\n")

    def _moves(self, rank: int, fd: int) -> bool:
        """Whether this rank's bars move on this stream."""
        return rank == 0 and fd in self.terminals

    def _finished(self, rank: int, fd: int, data: bytes) -> bytes:
        """The text to show now that `data` has arrived. Keeps the rest."""
        rest = self.rest[rank, fd]
        moves = self._moves(rank, fd)
        if rest.endswith(b"\r"):  # only the next byte tells whether it is half of "\r\n"
            data = bytes(rest) + data
            rest.clear()
        if not moves and b"\r" in data.partition(b"\n")[0][:-1]:
            self._leave(rank, fd)
        cut = max(data.rfind(b"\n"), data.rfind(b"\r", 0, -1) if moves else -1) + 1
        done = b""
        if cut:
            done = bytes(rest) + data[:cut]
            rest.clear()
        new = data[cut:]
        rest += new
        return done if moves else self._without_bars(rank, fd, done, new)

    def _without_bars(self, rank: int, fd: int, done: bytes, new: bytes) -> bytes:
        """`done` with only the last state of each bar; `new` is the end of the rest."""
        rest, bar = self.rest[rank, fd], (rank, fd)
        if done:
            self.bars.pop(bar, None)
            done = _last_states(done)
        if b"\r" in new:
            # The carriage return stays in front, to mark a bar.
            del rest[: max(0, rest.rfind(b"\r", 0, -1))]
        if _is_bar(rest):
            now = self.clock()
            if now - self.bars.setdefault(bar, now) >= BAR_EVERY_S and fd not in self.terminals:
                self.bars[bar] = now
                done += rest.strip(b"\r") + b"\n"
        return done

    def _show_held(self, held: Sequence[tuple[list[int], bytes]]) -> None:
        for ranks, text in held:
            for rank in ranks:
                self._end_line(rank, 2)
            if len(ranks) == 1:
                self._show(ranks[0], 2, text)
                continue
            self._claim(-1, 2)
            tag = self._mark(f"ranks {spans(ranks)}", ranks[0], 2)
            lines = _last_states(text).removesuffix(b"\n").split(b"\n")
            self.write(2, b"".join(tag + line + b"\n" for line in lines))
            self._remember(ranks, 2, text)

    def _end_line(self, rank: int, fd: int) -> None:
        text = bytes(self.rest[rank, fd])
        if not self._moves(rank, fd):
            text = text.strip(b"\r")
        if text:
            already = self._claim(rank, fd)
            self.write(fd, self._tag(rank, fd, text, already) + b"\n")
            self._remember((rank,), fd, b"\n")
        self.rest[rank, fd].clear()

    def _unshown(self) -> list[int]:
        """The streams on which rank 0 has an unfinished line to show; in a file, not bars."""
        return [
            fd
            for fd in (1, 2)
            if (text := self.rest.get((0, fd)))
            and self.open.get(self.targets[fd]) != (0, fd, len(text))
            and (fd in self.terminals or not _is_bar(text))
        ]

    def _claim(self, rank: int, fd: int) -> int:
        """Makes the target ready for a line: how many bytes of that line it shows already."""
        target = self.targets[fd]
        holder = self.open.pop(target, None)
        if holder is None:
            return 0
        if holder[:2] == (rank, fd):
            return holder[2]
        if holder[1] in self.terminals:
            self.write(holder[1], _ERASE)
        else:
            self.write(holder[1], b"\n")
            # The part that is shown already is not repeated.
            del self.rest[holder[0], holder[1]][: holder[2]]
        return 0

    def _leave(self, rank: int, fd: int) -> None:
        """Ends the shown part of an unfinished line if another state of it follows."""
        if self.open.get(self.targets[fd], (-1, fd, 0))[:2] == (rank, fd):
            del self.open[self.targets[fd]]
            self.write(fd, b"\n")

    def _mark(self, name: str, rank: int, fd: int) -> bytes:
        """The text in front of a line."""
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
            text = text[already:]
            body = text[:-1].replace(b"\n", b"\n" + tag) + text[-1:]
            return body if already else tag + body
        end = begun.end() if already and (begun := _END.search(text)) else 0
        return text[already:end] + _STATE.sub(lambda state: tag + state[0], text[end:])
