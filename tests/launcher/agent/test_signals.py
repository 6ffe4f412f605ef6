"""Signals that are passed on to a rank, if it can do something with them."""

import os
import signal
import subprocess

import pytest

from hvdrun.agent.signals import pass_on
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


def test_a_process_that_has_ended_is_absent_also_before_it_is_waited_for():
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert pass_on(process.pid, signal.SIGUSR1) == b"absent"
    process.wait()
    assert pass_on(process.pid, signal.SIGUSR1) == b"absent"
