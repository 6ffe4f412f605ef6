"""Two sessions of tests at the same time."""

import os
import re
import signal
import subprocess
import sys

import pytest

from tests.harness.side_by_side import STOP_AT_A_FAILURE, verdict
from tests.harness.worlds import ROOT, end_tree

LIMIT_S = 60.0
TESTS = """
import time
import pytest

@pytest.fixture(scope="session")
def hosts():
    yield
    print("down", flush=True)

@pytest.fixture
def world(hosts):
    pass

def test_on_a_world(world):
    assert False

def test_without_one():
    pass
"""
WAITING = TESTS.replace("assert False", "print('up', flush=True); time.sleep(60)")


@pytest.mark.parametrize(
    ("codes", "expected"),
    [([0, 0], 0), ([5, 0], 0), ([0, 5], 0), ([5, 5], 5), ([0, 1], 1), ([2, 1], 2), ([0, -9], 137)],
)
def test_the_exit_code_is_that_of_the_session_that_fails(codes, expected):
    assert verdict(codes) == expected


def start(folder, tests, *options):
    (folder / "test_it.py").write_text(tests)
    options = ["-s", "-p", "tests.conftest", "--mpi", "mpich", "--world", "2", *options]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.harness.side_by_side", *options, "--rootdir", folder, folder],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_the_output_of_both_sessions_is_shown_and_a_failure_of_one_is_that_of_both(tmp_path):
    process = start(tmp_path, TESTS, "-v")
    said = process.communicate(timeout=LIMIT_S)[0].decode()
    assert process.returncode == 1, said
    assert "1 failed, 1 deselected" in said
    assert "1 passed, 1 deselected" in said
    assert said.index("::test_on_a_world") < said.index("::test_without_one")
    end = r"worlds: exit code 1\n    \S*test_it.py::test_on_a_world\[.+\]\nothers: passed\n\Z"
    assert re.search(end, said), said


@pytest.mark.wide
def test_last_failed_runs_nothing_in_a_session_without_a_failure(tmp_path):
    process = start(tmp_path, "def test_without_a_world():\n    pass\n", "--lf")
    said = process.communicate(timeout=LIMIT_S)[0].decode()
    assert process.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, said


def test_one_session_lists_the_tests(tmp_path):
    process = start(tmp_path, TESTS, "-q", "--collect-only")
    said = process.communicate(timeout=LIMIT_S)[0].decode()
    assert process.returncode == 0, said
    assert "2 tests collected" in said


@pytest.mark.parametrize(
    ("argument", "stops"),
    [("-x", True), ("-xq", True), ("-vsx", True), ("--maxfail=1", True), ("-k", False)],
)
def test_with_these_arguments_a_failure_in_one_session_ends_the_other(argument, stops):
    assert bool(STOP_AT_A_FAILURE.fullmatch(argument)) == stops


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        signal.SIGKILL,
        pytest.param(signal.SIGINT, marks=pytest.mark.wide),  # the handler is SIGTERM's
    ],
)
def test_a_signal_ends_both_sessions_in_good_order(tmp_path, number):
    process = start(tmp_path, WAITING)
    assert process.stdout
    try:
        while b"up\n" not in (line := process.stdout.readline()):
            assert line
        process.send_signal(number)
        said, _ = process.communicate(timeout=LIMIT_S)  # until both sessions have closed it
    finally:
        end_tree(process)
    assert b"down\n" in said, said
    assert process.returncode == (-number if number == signal.SIGKILL else 2)
