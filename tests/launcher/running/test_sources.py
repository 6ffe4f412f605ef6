"""Signals of other nodes: to hvdrun itself until it can tell whose they are."""

import signal

import pytest

from hvdrun.running.sources import NodeSignals


@pytest.fixture
def signals():
    """Of a process that has a handler for USR1."""
    former = signal.signal(signal.SIGUSR1, lambda *_: None)
    yield NodeSignals()
    signal.signal(signal.SIGUSR1, former)


def test_before_the_job_runs_they_are_as_this_processs_own(signals):
    had = []
    signal.signal(signal.SIGUSR1, lambda number, _: had.append(number))
    signals.add(signal.SIGUSR1, 2)
    assert had == [signal.SIGUSR1]
    assert signals.read() == []


def test_then_each_comes_with_its_node(signals):
    signals.begin()
    for node in range(3):
        signals.add(signal.SIGTERM, node)
    signals.add(signal.SIGINT, 70_000)
    expected = [(signal.SIGTERM, node) for node in range(3)]
    assert signals.read() == [*expected, (signal.SIGINT, 70_000)]
    assert signals.read() == []


def test_a_flood_of_them_holds_nobody_up(signals):
    signals.begin()
    for _ in range(20_000):
        signals.add(signal.SIGTERM, 1)
    assert len(signals.read()) == 1024
