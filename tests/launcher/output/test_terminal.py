"""hvdrun on a terminal: what is shown there, what is typed there, and how it is left."""

import os
import re
import signal
import termios
import time

import pytest

from hvdrun.job.course import ONE_ACT_S

UP = "import os, sys, time\nprint('up', flush=True)\n"


def test_a_prompt_without_a_newline_is_shown_at_once(terminal, python):
    code = "import os; print(f'got {input(\"name? \")}') if os.environ['RANK'] == '0' else None"
    terminal.hvdrun("-np", "2", python, "-c", code)
    terminal.read_until(b"[0] \x1b[0mname? ")
    terminal.type(b"Ann\n")
    terminal.read_until(b"got Ann")
    assert terminal.code() == 0


def test_a_breakpoint_works_in_rank_0(terminal, python):
    code = "import os\nanswer = 6 * 7\nif os.environ['RANK'] == '0': breakpoint()\nprint('over')"
    terminal.hvdrun("-np", "2", python, "-c", code)
    terminal.read_until(b"(Pdb) ")
    terminal.type(b"p 'answer', answer\n")
    terminal.read_until(b"('answer', 42)")
    terminal.read_until(b"(Pdb) ", times=2)
    terminal.type(b"c\n")
    assert terminal.code() == 0
    assert terminal.seen.count(b"over") == 2


@pytest.mark.parametrize("python", ["mpich"], indirect=True)
def test_each_rank_has_its_colour(terminal):
    terminal.hvdrun("-np", "2", "echo", "hello")
    assert terminal.code() == 0
    assert b"\x1b[36m[0] \x1b[0mhello\r\n" in terminal.seen
    assert b"\x1b[33m[1] \x1b[0mhello\r\n" in terminal.seen


def test_ctrl_c_is_answered_at_once_and_the_second_one_kills(terminal, python):
    ignoring = "import signal\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\n"
    terminal.hvdrun("-np", "2", python, "-c", f"{ignoring}{UP}time.sleep(60)")
    terminal.read_until(b"up", times=2)
    terminal.type(b"\x03")
    terminal.read_until(
        b"hvdrun: Ctrl-C: the 2 ranks have 3 s to end; a second Ctrl-C kills them at once"
    )
    time.sleep(2 * ONE_ACT_S)
    terminal.type(b"\x03")
    terminal.read_until(b"hvdrun: Ctrl-C again: killing everything now")
    assert terminal.code() == 128 + signal.SIGINT


@pytest.mark.parametrize("python", ["mpich"], indirect=True)
def test_the_terminal_is_left_as_it_was(terminal, python):
    """Although the rank that has changed it is killed."""
    modes = termios.tcgetattr(terminal.inside)
    changes = (
        "import termios\nmodes = termios.tcgetattr(0)\n"
        "modes[3] &= ~(termios.ECHO | termios.ICANON)\n"
        "termios.tcsetattr(0, termios.TCSANOW, modes)\nos.set_blocking(0, False)\n"
        "assert termios.tcgetattr(0)[3] == modes[3]\nos.kill(os.getpid(), 9)"
    )
    terminal.hvdrun("-np", "1", python, "-c", UP + changes)
    assert terminal.code() == 128 + signal.SIGKILL, terminal.seen
    assert termios.tcgetattr(terminal.inside) == modes
    assert os.get_blocking(terminal.inside)


BARS = """
import os, sys
for i in range(4):
    print(f"\\r{i}/3", end="", file=sys.stderr)
print(file=sys.stderr)
"""


@pytest.mark.parametrize("python", ["mpich"], indirect=True)
def test_the_bars_of_several_ranks_end_each_on_its_line(terminal, python):
    terminal.hvdrun("-np", "3", python, "-c", BARS)
    assert terminal.code() == 0
    shown = [line.rpartition("\r")[2] for line in terminal.seen.decode().split("\r\n")]
    plain = [re.sub(r"\x1b\[[0-9;]*[mK]", "", line) for line in shown]
    assert sorted(line for line in plain if "3/3" in line) == [f"[{r}] 3/3" for r in range(3)]
