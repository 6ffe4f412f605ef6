"""`hvdrun --monitor` as its user sees it: on a terminal and without one, under both MPIs."""

import os
import re
import signal
import subprocess
import termios
import time
from types import SimpleNamespace

import pytest

from hvdrun.job.course import Course, Supervision
from hvdrun.job.events import RankSaid
from hvdrun.machine.notes import PULSE
from hvdrun.monitor import monitor
from hvdrun.plan.request import Request
from hvdrun.pulse import Pulse, encode
from tests.harness.worlds import ROOT, end_tree
from tests.launcher.job.histories import begun, command

UP = "import os, sys, time\nprint('up', flush=True)\n"
LASTS = f"{UP}time.sleep(60)"
TRAINS = """
import time
import torch
import hvdlite as hvd
hvd.init()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for step in range(1000):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    hvd.report_progress(loss=torch.tensor(hvd.rank() + 0.25))
    time.sleep(0.1)
"""
KEYS = b"s stacks   m table   q end the job   ? help"


def plain(data):
    return re.sub(rb"\x1b\[[0-9;]*m", b"", data)


@pytest.mark.parametrize("python", ["openmpi"], indirect=True)
def test_without_a_terminal_a_line_says_how_the_job_fares(python):
    words = [python.with_name("hvdrun"), "-np", "2", "--monitor", python, "-c", TRAINS]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    process = subprocess.Popen(words, cwd=ROOT, text=True, start_new_session=True, **pipes)
    try:
        # Both ranks' losses, 0.25 and 1.25; an earlier line may know of one rank only.
        wanted = r"hvdrun: 0:\d\d:\d\d, \d+ steps, \d+\.\d+ steps/s, loss 0\.75\n"
        lines = []
        while not lines or not re.fullmatch(wanted, lines[-1]):
            lines.append(process.stderr.readline())
            assert lines[-1], lines
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        end_tree(process)
    assert process.returncode == 130
    assert "\x1b" not in out + err
    assert "where the time of a step goes" in err  # as with --summary


@pytest.mark.parametrize("python", ["mpich"], indirect=True)
def test_keys_ask_for_stacks_and_end_the_job(terminal, python):
    modes = termios.tcgetattr(terminal.inside)
    script = f"{UP}print('typed:', repr(sys.stdin.read()))\ntime.sleep(60)"
    terminal.hvdrun("-np", "2", "--monitor", python, "-c", script)
    terminal.read_until(b"typed: ''", times=2)  # nothing goes to rank 0
    terminal.read_until(KEYS)
    assert not termios.tcgetattr(terminal.inside)[3] & (termios.ICANON | termios.ECHO)
    for typed, answer in (
        (b"s", b"rank 1 on localhost sleeps"),
        (b"\x1b[A?", b"?  takes this help away"),  # an arrow is no key
        (b"\x1a", b"hvdrun: Ctrl-Z: hvdrun does not stop"),
        (b"q", b"end the job, as Ctrl-C does?"),
        (b"n", KEYS),
        (b"qy", b"end the job, as Ctrl-C does?"),  # pasted at once, y is no answer
    ):
        terminal.seen = b""
        terminal.type(typed)
        terminal.read_until(answer)
    assert b"Ctrl-C: the 2 ranks have" not in terminal.seen
    terminal.type(b"y")
    assert terminal.code() == 130
    assert b"hvdrun: Ctrl-C: the 2 ranks have 3 s to end" in terminal.seen
    assert termios.tcgetattr(terminal.inside) == modes
    # The live part is gone.
    assert b"stacks" not in plain(terminal.seen).rpartition(b"\x1b[J")[2]


@pytest.mark.parametrize("python", ["mpich"], indirect=True)
@pytest.mark.parametrize(
    ("ends", "code"),
    [
        (lambda job: job.send_signal(signal.SIGTERM), 143),
        pytest.param(lambda job: job.send_signal(signal.SIGHUP), 129, marks=pytest.mark.wide),
        ("os.kill(os.getpid(), 9)", 137),
        pytest.param("sys.exit(3)", 3, marks=pytest.mark.wide),
        pytest.param("", 0, marks=pytest.mark.wide),
    ],
)
def test_however_the_job_ends_the_terminal_is_as_it_was(terminal, python, ends, code):
    modes = termios.tcgetattr(terminal.inside)
    does = ends if isinstance(ends, str) else "time.sleep(60)"
    # The rank goes on once the terminal has been taken.
    waits = "import termios\nwhile termios.tcgetattr(1)[3] & termios.ICANON: time.sleep(0.01)\n"
    with open(os.ttyname(terminal.inside)) as inside:
        script = UP + waits.replace("tcgetattr(1)", f"tcgetattr(os.open({inside.name!r}, 0))")
    terminal.hvdrun("-np", "1", "--monitor", python, "-c", script + does)
    terminal.read_until(KEYS)
    if not isinstance(ends, str):
        ends(terminal.process)
    assert terminal.code() == code, terminal.seen
    assert termios.tcgetattr(terminal.inside) == modes


@pytest.mark.parametrize("python", ["mpich"], indirect=True)
def test_after_it_was_stopped_the_keys_work_again(terminal, python):
    modes = termios.tcgetattr(terminal.inside)
    terminal.hvdrun("-np", "1", "--monitor", python, "-c", LASTS)
    terminal.read_until(KEYS)
    terminal.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, terminal.process.pid, os.WSTOPPED)
    termios.tcsetattr(terminal.inside, termios.TCSANOW, modes)  # as a shell does
    terminal.process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + 30
    while termios.tcgetattr(terminal.inside)[3] & termios.ICANON:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    terminal.type(b"q")
    terminal.read_until(b"end the job, as Ctrl-C does?")
    terminal.type(b"y")
    assert terminal.code() == 130
    assert termios.tcgetattr(terminal.inside) == modes


class Screen:
    def __init__(self):
        self.live = None
        self.lines = []
        self.output = SimpleNamespace(say=self.lines.append)


@pytest.fixture
def told(monkeypatch):
    """A monitor without a terminal, of a job whose ranks tell of their steps until 200 s."""
    monkeypatch.setattr(monitor, "place_of", lambda _: None)
    course = Course(command(a=2, b=2), 0.0, Supervision(Request(())))
    for now, event in begun():
        course.on(now, event)
    screen = Screen()
    shown = monitor.Monitor(course, screen, None, None, {})

    def tick(*times):
        for now in times:
            if now % 2 == 0:
                pulse = Pulse(now, 10 * now, now, 0, 0)
                course.on(now, RankSaid(0, PULSE, encode(pulse)))
            shown.tick(now)
        return [line.split(",")[0].removeprefix("hvdrun: ") for line in screen.lines]

    return SimpleNamespace(course=course, screen=screen, monitor=shown, tick=tick)


def test_lines_come_every_ten_seconds_and_later_every_minute(told):
    times = told.tick(*range(3, 250))
    seconds = [60 * int(each.split(":")[1]) + int(each.split(":")[2]) for each in times]
    assert seconds == [4, *range(14, 130, 10), 184, 244]


def test_a_job_that_tells_nothing_has_one_line_about_it(told):
    for now in range(1, 600, 2):
        told.monitor.tick(float(now))
    (line,) = told.screen.lines
    assert line.startswith("hvdrun: 0:01:01, no rank has told of a step")


def test_a_monitor_that_fails_ends_alone(told, monkeypatch):
    monkeypatch.setattr(monitor, "figures_of", lambda *_: 1 / 0)
    told.monitor.tick(5.0)
    told.monitor.tick(9.0)
    assert told.screen.lines == [
        "hvdrun: --monitor has failed, and the job goes on: ZeroDivisionError: division by zero"
    ]


def test_a_reader_that_is_gone_is_for_the_loop_to_notice(told, monkeypatch):
    def gone(*_):
        raise BrokenPipeError

    monkeypatch.setattr(monitor, "figures_of", gone)
    with pytest.raises(BrokenPipeError):
        told.monitor.tick(5.0)
