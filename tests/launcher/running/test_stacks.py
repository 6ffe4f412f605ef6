"""Where ranks are in their Python code: said when the stall check reports, and on request."""

import contextlib
import os
import re
import selectors
import socket
import subprocess
import threading

import pytest

from hvdrun.running.askers import METRICS, STACKS, Askers, NoAnswer, address, ask
from tests.harness.programs import run_program
from tests.harness.worlds import ROOT, end_tree

STALLS = """
import ctypes, os, signal, sys, threading, time
import torch
import hvdlite as hvd

def load():
    if sys.argv[1] == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    # The main thread waits in C, and holds the GIL.
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)

def main():
    hvd.init()
    hvd.barrier()
    if sys.argv[1] == "orders":
        # Another thread might call what is missing, as far as hvdlite knows.
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        for name in ("x", "y") if hvd.rank() == 1 else ("y", "x"):
            hvd.allreduce(torch.ones(3), name=name)
    if hvd.rank() == 1:
        load()
    hvd.allreduce(torch.ones(3), name="loss")

main()
"""
REPORT = (
    r"hvdrun: where the ranks are that allreduce 'loss' \(train.py:21\) waits for, "
    r"and those in it:\n"
    r"    rank 1 on localhost {does}: .*\(process \d+\)\n{stack}"
    r"    ranks 0,2 on localhost\n"
    r"        hvdlite/collectives/allreduce.py:\d+ in allreduce\n"
    r"        {script}:21 in main\n"
    r"        {script}:23 in <module>\n"
)
IN_LOAD = (
    r"        {script}:9 in load\n        {script}:20 in main\n        {script}:23 in <module>\n"
)


@pytest.fixture
def started(python, tmp_path):
    """hvdrun with three ranks, of which one stalls; its stderr to read."""
    script = tmp_path / "train.py"
    script.write_text(STALLS.lstrip())
    processes = []

    def start(what):
        options = ("-np", "3", "--stall-check-warning-time-seconds", "3")
        process = subprocess.Popen(
            [python.with_name("hvdrun"), *options, python, script, what],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        processes.append(process)
        return process, re.escape(str(script))

    yield start
    for process in processes:
        end_tree(process)
        process.stderr.close()


def lines_of_report(process, count):
    for line in process.stderr:
        if "where the ranks are" in line:
            return line + "".join(process.stderr.readline() for _ in range(count - 1))
    raise AssertionError("it has said nothing")


def test_a_report_of_the_stall_check_is_followed_by_where_the_ranks_are(started):
    process, script = started("in C")
    stack = IN_LOAD.format(script=script)
    expected = REPORT.format(does="waits for data from a pipe", stack=stack, script=script)
    report = lines_of_report(process, 9)
    assert re.fullmatch(expected, report), report
    hvdrun = process.args[0].with_name("hvdrun")
    done = run_program([hvdrun, "--stacks", str(process.pid)], 60)
    assert done.code == 0, done
    assert re.match(r"3 ranks:\n    ranks 0,2 on localhost\n", done.stdout), done
    assert re.search(stack, done.stdout), done


@pytest.mark.wide_in("mpich")
def test_of_a_stopped_rank_it_is_said_since_when_and_where_it_last_waited(started):
    process, script = started("stopped")
    does = r"is stopped, for \d+\.\d s now \(`kill -CONT \d+` there lets it go on\)"
    stack = rf"        {script}:13 in main\n        {script}:23 in <module>\n"
    expected = REPORT.format(does=does, stack=stack, script=script).replace(
        r"\(process \d+\)", r"\(process \d+\); it last waited for hvdlite here:"
    )
    report = lines_of_report(process, 8)
    assert re.fullmatch(expected, report), report


def test_of_ranks_in_different_operations_both_orders_are_shown(started):
    process, script = started("orders")
    report = lines_of_report(process, 12)
    place = (
        r"        hvdlite/collectives/allreduce.py:\d+ in allreduce\n"
        rf"        {script}:18 in main\n        {script}:23 in <module>\n"
    )
    entries = [r"    rank 1 on localhost .*\n" + place, r"    ranks 0,2 on localhost\n" + place]
    if "those in it:\n    ranks 0" in report:
        entries.reverse()  # rank 1 has reported
    expected = (
        r"hvdrun: where the ranks are that allreduce '[xy]' \(train.py:18\) waits for, "
        r"and those in it:\n"
        + "".join(entries)
        + r"hvdrun: the last operation that ranks 0-2 have all ended is an unnamed barrier"
        + r" \(no\. \d+\)\n"
        r"    ranks 0,2 went on to allreduce 'y', which rank 1 has not called\n"
        r"    rank 1 went on to allreduce 'x', which ranks 0,2 have not called\n"
    )
    assert re.fullmatch(expected, report), report
    line = process.stderr.readline()
    assert line == "    rank 1 called allreduce 'x' where ranks 0,2 called allreduce 'y'\n"


# ---- who asks, and who answers


class Served:
    """What the loop of hvdrun does with it."""

    def __init__(self):
        self.selector = selectors.DefaultSelector()
        self.asked = []
        self.metrics_asked = []
        on_asked = {STACKS: self.asked.append, METRICS: self.metrics_asked.append}
        self.askers = Askers(self.selector, on_asked)

    def turn(self):
        for key, _ in self.selector.select(10):
            key.data()

    def answers(self, text, question=STACKS):
        """One question, by another thread."""
        got = []

        def asks():
            try:
                got.append(ask(os.getpid(), question))
            except NoAnswer as error:
                got.append(str(error))

        thread = threading.Thread(target=asks)
        thread.start()
        self.turn()
        self.askers.answer(max(self.asked + self.metrics_asked), text)
        while self.askers.answered:
            self.turn()
        thread.join()
        return got[0]


@pytest.fixture
def served():
    found = Served()
    yield found
    found.askers.close()


def test_each_question_gets_its_answer_however_long(served):
    for text in ("3 ranks:", "x" * 2_000_000):
        assert served.answers(text) == text
    assert served.asked == [1, 2]


def test_the_questions_are_told_apart(served):
    assert served.answers("a table", METRICS) == "a table"
    assert served.answers("3 ranks:") == "3 ranks:"
    assert (served.metrics_asked, served.asked) == ([1], [2])


def test_a_job_that_ends_meanwhile_gives_no_answer(served):
    assert served.answers("") == f"the job of process {os.getpid()} is ending, or has ended"
    served.askers.close()
    with pytest.raises(NoAnswer, match=r"process \d+ is no hvdrun that runs a job on this host"):
        ask(os.getpid())


def as_another_user(does):
    """In a fork of this process, whose exit code it returns."""

    def as_4321():
        os.setgroups([])
        os.setgid(4321)
        os.setuid(4321)
        return does()

    return in_a_fork(as_4321)


def in_a_fork(does):
    """The exit code of a fork of this process."""
    child = os.fork()
    if not child:
        code = 1
        try:
            code = does()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_user_gets_no_answer(served):
    def asks():
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(address(os.getppid()))
        return 0

    assert as_another_user(asks) == 0
    served.turn()
    assert served.asked == []


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_user_who_has_the_name_is_not_believed():
    """The other user's process ends, and this one keeps its socket."""
    sock = socket.socket(socket.AF_UNIX)

    def takes_the_name():
        sock.bind(address(os.getppid()))
        sock.listen()
        return 0

    with sock:
        assert as_another_user(takes_the_name) == 0
        Served().askers.close()  # hvdrun runs without it
        with pytest.raises(NoAnswer, match=r"a process of user 4321 answers in place of process"):
            ask(os.getpid())


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_job_of_another_user_answers_only_that_user_and_root():
    listens, held = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(held[1])
            os.setuid(4321)
            with socket.socket(socket.AF_UNIX) as sock:
                sock.bind(address(os.getpid()))
                sock.listen()
                os.write(listens[1], b"x")
                for _ in range(2):
                    # (It may be gone already.)
                    with sock.accept()[0] as asker, contextlib.suppress(OSError):
                        asker.sendall(b"3 ranks:\n\x1b[2J")
                os.read(held[0], 1)
        finally:
            os._exit(0)
    os.close(listens[1])
    try:
        assert os.read(listens[0], 1) == b"x"

        def asks():
            os.setuid(4322)
            with pytest.raises(NoAnswer, match=rf"process {pid} runs a job of user 4321: only"):
                ask(pid)
            return 0

        assert in_a_fork(asks) == 0
        assert ask(pid) == "3 ranks:\n?[2J"
    finally:
        for fd in (listens[0], *held):
            os.close(fd)
        os.waitpid(pid, 0)


def test_another_process_of_this_user_is_not_believed_either():
    another = os.getppid()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(address(another))
        sock.listen()
        found = rf"process {os.getpid()} answers in place of process {another}$"
        with pytest.raises(NoAnswer, match=found):
            ask(another)
