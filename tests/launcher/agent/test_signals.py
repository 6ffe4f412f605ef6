"""Signals that are passed on to a rank, if it can do something with them."""

import os
import signal
import subprocess
import sys

import pytest

from hvdrun.agent.signals import is_caught, pass_on
from tests.harness.worlds import end_tree

SHELL = "{} USR1; echo up; read line; exit 5"


@pytest.mark.parametrize(
    ("begin", "answer", "code"),
    [("trap 'exit 7'", b"sent", 7), ("trap ''", b"sent", 5), ("trap -", b"deadly", 5)],
    ids=["handled", "ignored", "default"],
)
def test_a_signal_is_sent_to_a_process_that_it_does_not_end(begin, answer, code):
    command = ["sh", "-c", SHELL.format(begin)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, start_new_session=True) as process:
        try:
            assert process.stdout.readline() == b"up\n"
            assert pass_on(process.pid, signal.SIGUSR1) == answer
            process.stdin.close()
            assert process.wait(60) == code
        finally:
            end_tree(process)


@pytest.mark.parametrize("handler", ["SIG_DFL", "SIG_IGN", "getsignal"])
def test_a_shells_trap_does_not_count_as_a_handler_and_a_programs_handler_does(handler):
    program = f"import signal; signal.signal(signal.SIGTERM, signal.{handler})"
    program += "; print('up', flush=True); input()"
    trap = "trap 'exit 7' TERM; echo up; read line"
    is_handler = handler == "getsignal"
    for command, expected in ([sys.executable, "-c", program], is_handler), (["sh", "-c", trap], 0):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, **pipes, start_new_session=True) as process:
            try:
                assert process.stdout.readline() == b"up\n"
                assert is_caught(process.pid, signal.SIGTERM) == expected
            finally:
                end_tree(process)


def test_a_process_that_has_ended_is_absent_also_before_it_is_waited_for():
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert pass_on(process.pid, signal.SIGUSR1) == b"absent"
    process.wait()
    assert pass_on(process.pid, signal.SIGUSR1) == b"absent"
