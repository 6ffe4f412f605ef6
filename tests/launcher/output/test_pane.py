"""The live part of a terminal: on a small emulation of one that has no height."""

import os
import re

import pytest

from hvdrun.output.pane import BEHIND_S, EVERY_S, Line, Pane, place_of

_CODE = re.compile(rb"\x1b\[([0-9]*)([A-Za-z])|(\r)|(\n)|([^\x1b])")


class Emulated:
    """What a terminal of that width shows; it wraps, and a new line begins at its left edge."""

    def __init__(self, columns=80):
        self.columns = columns
        self.rows = [""]
        self.x = self.y = 0

    def write(self, data):
        assert b"\n" not in data or self.x >= 0
        for found in _CODE.finditer(data):
            number, letter, back, new, char = found.groups()
            if letter == b"A":
                self.y -= int(number or 1)
                assert self.y >= 0
            elif letter == b"J":
                self.rows[self.y] = self.rows[self.y][: self.x]
                del self.rows[self.y + 1 :]
            elif letter == b"K":
                self.rows[self.y] = self.rows[self.y][: self.x]
            elif back:
                self.x = 0
            elif new:
                self._down()
            elif char:
                if self.x == self.columns:
                    self._down()
                row = self.rows[self.y].ljust(self.x)
                self.rows[self.y] = row[: self.x] + char.decode() + row[self.x + 1 :]
                self.x += 1

    def _down(self):
        self.y, self.x = self.y + 1, 0
        if self.y == len(self.rows):
            self.rows.append("")

    def narrowed(self, columns):
        """As terminals do that wrap again what they show. The cursor stays at the end."""
        rows = [
            row[at : at + columns] for row in self.rows for at in range(0, len(row) or 1, columns)
        ]
        self.columns, self.rows = columns, rows
        self.y, self.x = len(rows) - 1, len(rows[-1])


class Screen:
    def __init__(self, columns=80):
        self.terminal = Emulated(columns)
        self.writes = 0
        self.behind = False
        self.pane = Pane(self._write, lambda: self.behind, lambda: self.terminal.columns)
        self.now = 0.0

    def _write(self, data):
        self.writes += 1
        self.terminal.write(data)

    def live(self, *lines):
        self.pane.show([Line(line, len(line)) for line in lines])

    def shows(self):
        self.now += EVERY_S
        self.pane.tick(self.now)
        return self.terminal.rows


def test_output_scrolls_above_the_live_part():
    screen = Screen()
    screen.live("---", "12 steps/s")
    screen.pane.feed(b"one\n")
    assert screen.shows() == ["one", "---", "12 steps/s"]
    screen.pane.feed(b"two\nthree\n")
    assert screen.shows() == ["one", "two", "three", "---", "12 steps/s"]
    screen.live("---", "no step", "q end")
    assert screen.shows() == ["one", "two", "three", "---", "no step", "q end"]
    screen.live("less")
    assert screen.shows() == ["one", "two", "three", "less"]


def test_lines_of_a_program_that_has_the_terminal_meanwhile_are_not_taken_away():
    screen = Screen()
    screen.live("---", "12 steps/s")
    screen.shows()
    screen.pane.leave()
    screen._write(b"\r\n$ ls\r\nfiles\r\n")
    screen.pane.feed(b"one\n")
    assert screen.shows() == ["---", "12 steps/s", "$ ls", "files", "one", ""]
    screen.live("---")
    assert screen.shows() == ["---", "12 steps/s", "$ ls", "files", "one", "---"]


def test_the_end_of_a_line_that_has_not_come_is_the_first_of_the_live_part():
    screen = Screen()
    screen.live("---")
    screen.pane.feed(b"lo")
    assert screen.shows() == ["lo", "---"]
    screen.pane.feed(b"ss\nac")
    assert screen.shows() == ["loss", "ac", "---"]
    screen.pane.close()
    screen._write(b"curacy\n")
    assert screen.terminal.rows == ["loss", "accuracy", ""]


def test_a_progress_bar_moves_above_the_live_part_and_ends_as_a_line():
    screen = Screen()
    screen.live("---")
    for state in (b"\r10%", b"\r\x1b[31m50%", b"\r\x1b[K100%"):
        screen.pane.feed(state)
        assert screen.shows() == [state.decode().split("\r")[1][-4:].lstrip("Km"), "---"]
    screen.pane.feed(b"\ndone\n")
    assert screen.shows() == ["100%", "done", "---"]


def test_a_bar_that_ends_with_its_carriage_return_is_shown_too():
    screen = Screen()
    screen.live("---")
    screen.pane.feed(b"50%\r")
    assert screen.shows() == ["50%", "---"]
    screen.pane.feed(b"99%\r\n")
    assert screen.shows() == ["99%", "---"]


def test_an_unfinished_line_is_cut_to_the_width_until_it_ends():
    screen = Screen(columns=10)
    screen.live("---")
    screen.pane.feed(b"x" * 25)
    assert screen.shows() == ["x" * 9, "---"]
    screen.pane.feed(b"\n")
    assert screen.shows() == ["x" * 10, "x" * 10, "x" * 5, "---"]


def test_a_terminal_that_has_become_narrower_keeps_no_rest_of_the_live_part():
    screen = Screen(columns=20)
    screen.pane.feed(b"out\n")
    screen.live("a" * 19, "b" * 12)
    assert screen.shows() == ["out", "a" * 19, "b" * 12]
    screen.terminal.narrowed(10)
    screen.live("short")
    assert screen.shows() == ["out", "short"]


def test_much_output_draws_the_live_part_no_more_often_than_now_and_then():
    screen = Screen()
    screen.live("---")
    screen.shows()
    before = screen.writes
    for number in range(1000):
        screen.pane.feed(b"%d\n" % number)
        screen.pane.tick(screen.now)
    assert screen.writes == before
    assert screen.pane.wait_s(screen.now) == pytest.approx(EVERY_S)
    assert screen.shows() == [*map(str, range(1000)), "---"]
    assert screen.writes == before + 1
    assert screen.pane.wait_s(screen.now) is None


def test_a_terminal_that_takes_nothing_gets_no_live_part_in_addition():
    screen = Screen()
    screen.behind = True
    screen.live("---")
    assert screen.shows() == [""]
    assert screen.pane.wait_s(screen.now) == pytest.approx(BEHIND_S)
    screen.behind = False
    screen.now += BEHIND_S
    assert screen.shows() == ["---"]


def test_after_the_end_nothing_of_the_live_part_is_left():
    screen = Screen()
    screen.live("---", "keys")
    screen.pane.feed(b"one\n")
    screen.shows()
    screen.pane.feed(b"two\n")
    screen.pane.close()
    assert screen.terminal.rows == ["one", "two", ""]
    screen.pane.close()
    assert screen.terminal.rows == ["one", "two", ""]


@pytest.fixture
def standard_files():
    """Replaces 1 and 2 by what the test gives, for as long as it runs."""
    kept = [os.dup(fd) for fd in (1, 2)]

    def replace(out, err):
        os.dup2(out, 1)
        os.dup2(err, 2)

    yield replace
    for fd, copy in zip((1, 2), kept, strict=True):
        os.dup2(copy, fd)
        os.close(copy)


def test_the_live_part_is_where_it_disturbs_nobody(standard_files, tmp_path):
    terminal, inside = os.openpty()
    reader, pipe = os.pipe()
    file = os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY)
    null = os.open(os.devnull, os.O_WRONLY)
    found = {}
    for name, out, err in (
        ("both", inside, inside),
        ("log", file, inside),
        ("null", null, inside),
        ("errors in a file", inside, file),
        ("pipe", pipe, inside),
        ("no terminal", file, file),
    ):
        standard_files(out, err)
        found[name] = place_of({"TERM": "xterm"})
    dumb = [place_of({"TERM": "dumb"}), place_of({})]
    standard_files(inside, inside)
    for fd in (terminal, inside, reader, pipe, file, null):
        os.close(fd)
    assert found == {
        "both": (2, {1, 2}),
        "log": (2, {2}),
        "null": (2, {2}),
        "errors in a file": (1, {1}),
        "pipe": None,
        "no terminal": None,
    }
    assert dumb == [None, None]
