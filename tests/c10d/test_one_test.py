"""A test's process group: it gets a time limit, and nothing of it stays."""

import faulthandler
import os
import signal
import time
import unittest

import pytest

from tests.c10d.one_test import FAILED, HUNG, PASSED, SKIPPED, Running

LIMIT_S = 60.0


class Case(unittest.TestCase):
    __test__ = False  # not for pytest

    def test_passes(self):
        pass

    def test_fails(self):
        os.write(2, b"before it fails")
        self.fail("on purpose")

    def test_skips(self):
        self.skipTest("no reason")

    def test_dies(self):
        os._exit(0)

    def test_hangs(self):
        self._with_a_child(wait=True)

    def test_leaves_a_process(self):
        self._with_a_child(wait=False)

    def _with_a_child(self, wait):
        child = os.fork()
        if child == 0:
            time.sleep(LIMIT_S)
            os._exit(0)
        if wait:
            os.waitpid(child, 0)


@pytest.fixture
def stacks(capfd):
    """As in a session."""
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    yield
    faulthandler.unregister(signal.SIGUSR1)


def end_of(name, folder, limit_s=LIMIT_S):
    running = Running(Case(name), limit_s, folder)
    while not (outcome := running.poll()):
        time.sleep(0.01)
    assert not any(folder.iterdir())
    return outcome


@pytest.mark.parametrize(
    ("name", "status", "text"),
    [
        ("test_passes", PASSED, ""),
        ("test_skips", SKIPPED, "no reason"),
        ("test_fails", FAILED, "before it fails"),
        ("test_dies", FAILED, "ended without a result"),
        ("test_leaves_a_process", FAILED, "left processes behind"),
    ],
)
def test_the_outcome_of_a_test(name, status, text, tmp_path):
    outcome = end_of(name, tmp_path)
    assert (outcome.test, outcome.status) == (name, status)
    assert text in outcome.text


def test_a_hanging_test_is_named_shows_its_stacks_and_leaves_no_process(tmp_path, stacks):
    outcome = end_of("test_hangs", tmp_path, limit_s=0.5)
    assert (outcome.test, outcome.status) == ("test_hangs", HUNG)
    assert outcome.text.startswith("no end after 0.5 s")
    assert outcome.text.count("in _with_a_child") == 2  # of both processes
    gone = outcome.text.count("Current thread") + outcome.text.count("Thread 0x")
    assert gone >= 2
