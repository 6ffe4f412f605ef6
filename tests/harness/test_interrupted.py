"""A test session that gets SIGTERM ends in good order."""

import os
import signal
import subprocess
import sys

import pytest

from tests.harness.worlds import ROOT, end_tree

LIMIT_S = 60.0
TESTS = """
import time
import pytest

@pytest.fixture(scope="session")
def hosts():
    yield
    print("down", flush=True)

def test_that_waits(hosts):
    print("up", flush=True)
    time.sleep(60)
"""


def test_what_the_fixtures_have_set_up_is_taken_down(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    options = ["-s", "-q", "-p", "no:cacheprovider", "-p", "tests.conftest"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, "--rootdir", tmp_path, tmp_path],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout
    try:
        while process.stdout.readline() not in (b"up\n", b""):
            pass
        for _ in range(2):  # as `timeout` does
            process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=LIMIT_S)
    finally:
        end_tree(process)
    assert b"down\n" in said, said
    assert process.returncode == pytest.ExitCode.INTERRUPTED
