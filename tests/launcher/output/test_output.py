import re
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdrun.output.output import Output


class Screen:
    """What is written to stdout and stderr, in order, and a clock that stands still."""

    def __init__(self, ranks: int = 3, same_target: bool = True, **options: Any):
        self.text = {1: b"", 2: b""}
        self.all = b""
        self.now = 100.0
        targets: dict[int, object] = {1: "tty", 2: "tty"} if same_target else {1: "out", 2: "err"}
        self.output = Output(ranks, self.write, targets=targets, clock=lambda: self.now, **options)

    def pause(self, seconds: float = 0.3) -> None:
        """What hvdrun does when nothing comes for a while."""
        self.now += seconds
        self.output.tick()

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
    screen = Screen(1)
    screen.output.feed(0, 1, b"name? ")
    assert screen.all == b"name? "


@pytest.mark.parametrize("same_target", [True, False])
def test_nothing_is_added_to_what_a_single_rank_prints_unless_hvdrun_speaks_on_its_line(
    same_target,
):
    screen = Screen(1, same_target)
    screen.output.feed(0, 1, b"no newline")
    screen.output.finish()
    assert screen.all == b"no newline"
    screen.output.say("hvdrun: over")
    assert screen.text[2] == (b"\n" if same_target else b"") + b"hvdrun: over\n"


def test_a_prompt_of_rank_0_is_shown_when_it_pauses():
    screen = Screen()
    screen.output.feed(0, 1, b"name? ")
    assert screen.output.wait_s() == pytest.approx(0.2)
    screen.pause()
    assert screen.all == b"[0] name? "
    assert screen.output.wait_s() is None
    screen.output.feed(0, 1, b"Ann\n")
    assert screen.all == b"[0] name? Ann\n"


def test_a_prompt_is_shown_also_while_others_talk():
    screen = Screen(terminals={1, 2})
    screen.output.feed(0, 1, b"name? ")
    for _ in range(4):
        screen.output.feed(1, 1, b"other\n")
        screen.pause(0.02)
    assert screen.all == 3 * b"[1] other\n" + b"[0] name? " + b"\r\x1b[K[1] other\n[0] name? "


def test_in_a_file_a_prompt_that_is_interrupted_goes_on_below():
    screen = Screen()
    screen.output.feed(0, 1, b"name? ")
    screen.pause()
    screen.output.feed(1, 1, b"other\n")
    screen.output.feed(0, 1, b"Ann\n")
    assert screen.all == b"[0] name? \n[1] other\n[0] Ann\n"


def test_on_a_terminal_a_bar_that_is_interrupted_is_drawn_anew():
    screen = Screen(terminals={1, 2})
    screen.output.feed(0, 2, b"\r 10%")
    screen.pause()
    screen.output.feed(1, 1, b"other\n")
    screen.pause()
    assert screen.all == b"\r[0]  10%\r\x1b[K[1] other\n[0]  10%"


def test_another_target_does_not_disturb_a_prompt():
    screen = Screen(same_target=False)
    screen.output.feed(0, 1, b"name? ")
    screen.pause()
    screen.output.feed(1, 2, b"other\n")
    assert screen.text == {1: b"[0] name? ", 2: b"[1] other\n"}


def test_on_a_terminal_the_bar_of_rank_0_draws_itself_anew():
    screen = Screen(terminals={1, 2})
    for data in (b"\r 10%", b"\r 20%", b"\r 30%\n"):
        screen.output.feed(0, 2, data)
        screen.pause()
    assert screen.all == b"\r[0]  10%\r[0]  20%\r[0]  30%\n"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("states", ["\r{}%", "{}%\r"], ids=["before", "after"])
def test_in_a_file_a_bar_is_a_line_now_and_then_and_at_its_end(rank, states):
    screen = Screen()
    for percent in range(100):
        screen.output.feed(rank, 2, states.format(percent).encode())
        screen.pause(0.3)
    screen.output.feed(rank, 2, b"\r100%\n")
    lines = screen.all.decode().splitlines()
    assert lines == [f"[{rank}] {percent}%" for percent in (34, 68, 100)]


def test_in_a_file_a_bar_that_never_ends_its_line_is_shown_at_the_end():
    screen = Screen()
    screen.output.feed(1, 2, b"\r 10%\r 20%")
    screen.output.finish()
    assert screen.all == b"[1]  20%\n"


def test_only_what_is_a_terminal_gets_its_signs():
    screen = Screen(same_target=False, terminals={2}, coloured=True)
    for fd in (1, 2):
        screen.output.feed(0, fd, b"half")
        screen.pause()
        screen.output.feed(1, fd, b"other\n")
        screen.output.feed(0, fd, b" and half\n")
    assert screen.text[1] == b"[0] half\n[1] other\n[0]  and half\n"
    assert b"\x1b[K" in screen.text[2]
    assert b"\x1b[36m[0] \x1b[0mhalf and half\n" in screen.text[2]
    assert b"\x1b[33m[1] \x1b[0mother\n" in screen.text[2]


def test_each_line_has_the_time_in_front_where_it_is_wanted():
    for ranks, tag in ((1, ""), (2, r"\[0\] ")):
        screen = Screen(ranks, timestamps=True)
        screen.output.feed(0, 1, b"a\nb\n")
        assert re.fullmatch(
            rf"(20\d\d-\d\d-\d\d \d\d:\d\d:\d\d\.\d{{3}} {tag}[ab]\n){{2}}", screen.all.decode()
        )


def test_what_is_kept_is_what_was_written():
    kept = {(0, 1): b"", (1, 2): b""}

    def keep(rank: int, fd: int, data: bytes) -> None:
        kept[rank, fd] += data

    screen = Screen(keep=keep)
    for rank, fd in kept:
        for data in (b"\r10%", b"\r20%", b"\nTrace", b"half\r\n"):
            screen.output.feed(rank, fd, data)
    assert set(kept.values()) == {b"\r10%\r20%\nTracehalf\r\n"}


TRACEBACK = b"""Traceback (most recent call last):
  File "train.py", line 3, in <module>
ZeroDivisionError: division by zero
"""


def folded(tag):
    return b"".join(tag + b" " + line for line in TRACEBACK.splitlines(keepends=True))


def test_the_same_traceback_of_all_ranks_is_shown_once_and_at_once():
    screen = Screen()
    for rank in (2, 0, 1):
        assert screen.all == b""
        screen.output.feed(rank, 2, TRACEBACK)
    assert screen.all == folded(b"[ranks 0-2]")


def test_a_traceback_that_torch_has_marked_with_the_rank_is_as_any_other():
    screen = Screen(2)
    for rank in (0, 1):
        lines = (b"[rank%d]: " % rank + line for line in TRACEBACK.splitlines(keepends=True))
        screen.output.feed(rank, 2, b"[rank%d]: mine\n" % rank)
        screen.output.feed(rank, 2, b"[rank%d]: failed:\n" % rank + b"".join(lines))
    heads = b"".join(b"[%d] [rank%d]: mine\n[%d] failed:\n" % (n, n, n) for n in (0, 1))
    assert screen.all == heads + folded(b"[ranks 0-1]")
    assert screen.output.tails[1].endswith(TRACEBACK)


def test_the_same_traceback_of_some_ranks_is_folded_and_another_one_is_not():
    screen = Screen(4)
    other = TRACEBACK.replace(b"Zero", b"One")
    for rank, text in enumerate((TRACEBACK, other, TRACEBACK, TRACEBACK)):
        screen.output.feed(rank, 2, b"before\n")
        for line in text.splitlines(keepends=True):
            screen.output.feed(rank, 2, line)
    screen.pause(1.0)
    before = b"".join(b"[%d] before\n" % rank for rank in range(4))
    lone = folded(b"[1]").replace(b"Zero", b"One")
    assert screen.all == before + folded(b"[ranks 0,2-3]") + lone


def test_what_a_rank_writes_after_a_traceback_stays_behind_it():
    screen = Screen()
    screen.output.feed(1, 2, TRACEBACK + b"and on\n")
    screen.output.feed(1, 2, b"and on\n")
    assert screen.output.wait_s() == pytest.approx(0.5)
    screen.pause(0.6)
    assert screen.all == folded(b"[1]") + 2 * b"[1] and on\n"


def test_a_traceback_begins_on_a_line_of_its_own():
    screen = Screen()
    screen.output.feed(1, 2, b"\r 10%" + TRACEBACK)
    screen.output.finish()
    assert screen.all == b"[1]  10%\n" + folded(b"[1]")


def test_what_only_looks_like_the_beginning_of_a_traceback_is_not_held():
    screen = Screen()
    for data in (b"Trace", b"s of it\n", b"T"):
        screen.output.feed(1, 2, data)
    screen.output.finish()
    assert screen.all == b"[1] Traces of it\n[1] T\n"


def test_while_the_job_is_being_ended_tracebacks_wait_for_the_others():
    screen = Screen()
    screen.output.ending()
    screen.output.feed(0, 2, TRACEBACK)
    screen.pause(2.0)
    screen.output.feed(2, 2, TRACEBACK)
    assert screen.all == b""
    screen.output.finish()
    assert screen.all == folded(b"[ranks 0,2]")


def test_while_the_job_is_being_ended_a_rank_that_goes_on_after_a_traceback_is_heard():
    screen = Screen()
    screen.output.ending()
    screen.output.feed(1, 2, TRACEBACK + b"saving\n")
    screen.pause(5.0)
    assert screen.all == folded(b"[1]") + b"[1] saving\n"
    screen.output.finish()


def test_on_a_terminal_the_bars_of_other_ranks_show_how_they_ended():
    screen = Screen(terminals={1, 2})
    for data in (b"\r 10%", b"\r 20%", b"\r 30%\n"):
        screen.output.feed(1, 2, data)
        screen.pause()
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
    screen = Screen(1)
    screen.output.feed(0, 1, text)
    screen.output.finish()
    screen.output.say("hvdrun: over")
    assert screen.all.endswith((b"done\nhvdrun: over\n", b"50%\r\nhvdrun: over\n"))


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"!\n"])
def test_in_a_file_a_line_that_begins_anew_after_it_was_shown_loses_nothing(end):
    screen = Screen()
    screen.output.feed(0, 1, b"10%")
    screen.pause()
    screen.output.feed(0, 1, b"\r")
    screen.output.feed(0, 1, b"100%" + end)
    assert screen.all == b"[0] 10%\n[0] 100%" + end


# In these seconds of CPU time; quadratic code would take many times as long.
LINEAR_S = 15
LONG_LINES = f"""
import resource
resource.setrlimit(resource.RLIMIT_CPU, ({LINEAR_S}, {LINEAR_S}))
from hvdrun.output.folding import HEADER
from hvdrun.output.output import Output
MIB = 1 << 20
x = b"x" * MIB
written = []
def feed(text, piece_bytes, ranks=(0,), terminals=()):
    output = Output(2, lambda fd, data: written.append(len(data)), terminals=terminals)
    for begin in range(0, len(text), piece_bytes):
        for rank in ranks:
            output.feed(rank, 2, text[begin : begin + piece_bytes])
        output.wait_s()
    output.finish()
    size = sum(written)
    written.clear()
    return size
"""


def bytes_shown(*calls):
    """What each of these calls of `feed` has shown: all in one process."""
    program = LONG_LINES + "".join(f"print(feed({call}))\n" for call in calls)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"no end after {LINEAR_S} s of CPU: {done.stdout}{done.stderr}"
    return [int(size) for size in done.stdout.split()]


MIB = 1 << 20
TAG = len(b"[0] ")


@pytest.mark.parametrize("terminals", [(), (2,)])
def test_the_work_for_a_line_of_a_mebibyte_is_linear_whatever_is_in_it(terminals):
    rest = f"1 << 16, (0,), {terminals}"
    shown = bytes_shown(
        rf'b"\r50%" + x + b"\n", {rest}',
        rf'b"50%\r" + x, {rest}',
        rf'x[:1000] + b"\r" * MIB + x, {rest}',
        rf'b"\n" * (1 << 16), {rest}',
        rf'(b"\r" + x[:999]) * 1000 + b"\n", {rest}',
    )
    assert shown[3] == (1 << 16) * (TAG + 1)
    if not terminals:  # where all states are shown there are more
        assert [*shown[:3], shown[4]] == [TAG + size + 1 for size in (3 + MIB, MIB, MIB, 999)]


def test_the_work_for_a_line_of_a_mebibyte_is_linear_also_in_small_pieces():
    shown = bytes_shown("x[1:], 8, (0,), (2,)", r'b"\r" + x[1:], 8')
    assert shown == [TAG + MIB] * 2


writes = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from([b"a", b"b", b"a\nb", b"\n", TRACEBACK, TRACEBACK[:5], TRACEBACK[5:]]),
        st.booleans(),
    )
)


def said_by(rank, shown):
    """What stands on the lines of that rank, alone or with others."""
    for tag, text in re.findall(rb"^\[(?:ranks )?([0-9,-]+)\] (.*)\n", shown, re.MULTILINE):
        spans = [span.split("-") for span in tag.decode().split(",")]
        if any(int(span[0]) <= rank <= int(span[-1]) for span in spans):
            yield text


@pytest.mark.parametrize("fd", [1, 2])
@given(events=writes)
def test_every_rank_keeps_every_byte_in_order(fd, events):
    screen = Screen()
    given_by = dict.fromkeys(range(3), b"")
    for rank, data, pause in events:
        given_by[rank] += data
        screen.output.feed(rank, fd, data)
        if pause:
            screen.pause()
    screen.output.finish()
    for rank, text in given_by.items():
        # Where rank 0 was interrupted, a line is in two pieces.
        assert b"".join(said_by(rank, screen.all)) == text.replace(b"\n", b"")


def test_the_culprits_traceback_is_shown_last():
    screen = Screen(3)
    screen.output.ending()
    for rank in (0, 1, 2):
        screen.output.feed(rank, 2, b"Traceback (most recent call last):\nError: %d\n" % rank)
    screen.output.finish(1)
    assert screen.all.endswith(b"[1] Traceback (most recent call last):\n[1] Error: 1\n")
    assert screen.output.recent.end_with(1, 2)
    assert screen.output.recent.end_with(2, 2)
    assert not screen.output.recent.end_with(1, 3)


@pytest.mark.parametrize(("between", "is_there"), [(0, True), (5, True), (6, False), (1000, False)])
def test_lines_are_just_above_where_few_others_follow_on_the_same_screen(between, is_there):
    screen = Screen()
    screen.output.feed(0, 2, b"a\nb\nc\n")
    screen.output.feed(1, 1, b"x\n" * between)
    assert screen.output.recent.end_with(0, 3) == is_there
    apart = Screen(same_target=False)
    apart.output.feed(0, 2, b"a\nb\nc\n")
    apart.output.feed(1, 1, b"x\n" * between)
    assert apart.output.recent.end_with(0, 3)


def test_a_ranks_lines_on_stdout_are_not_its_last_words():
    screen = Screen()
    screen.output.feed(0, 1, b"a\nb\nc\n")
    assert not screen.output.recent.end_with(0, 1)
