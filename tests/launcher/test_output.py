import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdrun.output import Output


class Screen:
    """What is written to stdout and stderr, in order."""

    def __init__(self, same_place: bool = True, **options: Any):
        self.text = {1: b"", 2: b""}
        self.all = b""
        place: dict[int, object] = {1: "tty", 2: "tty"} if same_place else {1: "out", 2: "err"}
        self.output = Output(write=self.write, place=place, **{"tagged": True, **options})

    def write(self, fd, data):
        self.text[fd] += data
        self.all += data


def test_each_line_has_its_rank_in_front_and_its_own_stream():
    screen = Screen()
    screen.output.feed(0, 1, b"a\nb\n")
    screen.output.feed(1, 2, b"c\n")
    assert screen.text == {1: b"[0] a\n[0] b\n", 2: b"[1] c\n"}


def test_a_line_that_comes_in_pieces_is_written_whole():
    screen = Screen()
    screen.output.feed(1, 1, b"half")
    screen.output.feed(2, 1, b"other\n")
    screen.output.feed(1, 1, b" and half\n")
    assert screen.all == b"[2] other\n[1] half and half\n"


def test_a_single_rank_is_passed_through_at_once():
    screen = Screen(tagged=False)
    screen.output.feed(0, 1, b"name? ")
    assert screen.all == b"name? "


def test_a_prompt_of_rank_0_is_shown_when_it_pauses():
    screen = Screen()
    screen.output.feed(0, 1, b"name? ")
    assert screen.output.waiting()
    screen.output.pause()
    assert screen.all == b"[0] name? "
    assert not screen.output.waiting()
    screen.output.feed(0, 1, b"Ann\n")
    assert screen.all == b"[0] name? Ann\n"


def test_in_a_file_a_prompt_that_is_interrupted_goes_on_below():
    screen = Screen()
    screen.output.feed(0, 1, b"name? ")
    screen.output.pause()
    screen.output.feed(1, 1, b"other\n")
    screen.output.feed(0, 1, b"Ann\n")
    assert screen.all == b"[0] name? \n[1] other\n[0] Ann\n"


def test_on_a_terminal_a_bar_that_is_interrupted_is_drawn_anew():
    screen = Screen(terminal=True)
    screen.output.feed(0, 2, b"\r 10%")
    screen.output.pause()
    screen.output.feed(1, 1, b"other\n")
    screen.output.pause()
    assert screen.all == b"\r[0]  10%\r\x1b[K[1] other\n[0]  10%"


def test_another_place_does_not_disturb_a_prompt():
    screen = Screen(same_place=False)
    screen.output.feed(0, 1, b"name? ")
    screen.output.pause()
    screen.output.feed(1, 2, b"other\n")
    assert screen.text == {1: b"[0] name? ", 2: b"[1] other\n"}


def test_a_progress_bar_keeps_its_carriage_returns():
    screen = Screen()
    for data in (b"\r 10%", b"\r 20%", b"\r 30%\n"):
        screen.output.feed(0, 2, data)
        screen.output.pause()
    assert screen.all == b"\r[0]  10%\r[0]  20%\r[0]  30%\n"


def test_on_a_terminal_the_bars_of_other_ranks_show_how_they_ended():
    screen = Screen(terminal=True)
    for data in (b"\r 10%", b"\r 20%", b"\r 30%\n"):
        screen.output.feed(1, 2, data)
        screen.output.pause()
    assert screen.all == b"[1]  30%\n"


def test_the_line_ends_of_dos_are_line_ends_also_when_cut_in_two():
    screen = Screen()
    screen.output.feed(0, 1, b"a\r")
    screen.output.feed(0, 1, b"\nb\r\n")
    assert screen.all == b"[0] a\r\n[0] b\r\n"


def test_unfinished_lines_are_shown_at_the_end():
    screen = Screen()
    screen.output.feed(0, 1, b"zero")
    screen.output.feed(1, 1, b"one")
    screen.output.finish()
    screen.output.say("hvdrun: over")
    assert screen.all == b"[0] zero\n[1] one\nhvdrun: over\n"


@pytest.mark.parametrize("text", [b"done", b"50%\r"])
def test_a_report_begins_on_a_line_of_its_own(text):
    screen = Screen(tagged=False)
    screen.output.feed(0, 1, text)
    screen.output.finish()
    screen.output.say("hvdrun: over")
    assert screen.all.endswith((b"done\nhvdrun: over\n", b"50%\r\nhvdrun: over\n"))


writes = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.text(st.sampled_from("ab\n"), max_size=6).map(str.encode),
        st.booleans(),
    )
)


@given(writes)
def test_every_rank_keeps_every_byte_in_order(events):
    screen = Screen()
    given_by = dict.fromkeys(range(3), b"")
    for rank, data, pause in events:
        given_by[rank] += data
        screen.output.feed(rank, 1, data)
        if pause:
            screen.output.pause()
    screen.output.finish()
    for rank, text in given_by.items():
        lines = re.findall(rb"^\[%d\] (.*\n)" % rank, screen.all, re.MULTILINE)
        # Where rank 0 was interrupted, a line is in two pieces.
        assert b"".join(lines).replace(b"\n", b"") == text.replace(b"\n", b"")
        if rank:
            whole = text if text.endswith(b"\n") or not text else text + b"\n"
            assert b"".join(lines) == whole
