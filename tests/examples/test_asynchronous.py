"""examples/asynchronous.py: workers that do not wait reach the loss, with and without servers."""

import pytest

from tests.examples.conftest import EXAMPLES, LIMIT_S
from tests.harness.programs import run_program
from tests.harness.worlds import python_of


def run(mpi, *options, arguments=()):
    python = python_of(mpi)
    command = [python.with_name("hvdrun"), *options, python, EXAMPLES / "asynchronous.py"]
    finished = run_program([*command, "--expect-loss", "0.5", *arguments], LIMIT_S)
    assert finished.code == 0, finished
    return finished.of_rank(0).stdout


def steps(stdout):
    line = next(line for line in stdout.splitlines() if line.startswith("Steps of each worker: "))
    return [int(word) for word in line.partition("[")[2].partition("]")[0].split(",")]


def test_workers_with_a_server_reach_the_loss(mpi):
    by_worker = steps(run(mpi, "-np", "3", "--servers", "1"))
    assert len(by_worker) == 2
    assert sum(by_worker) >= 600


@pytest.mark.wide_in("mpich")
def test_workers_without_a_server_reach_the_loss(mpi):
    assert len(steps(run(mpi, "-np", "2"))) == 2


def test_workers_of_several_hosts_without_a_server_reach_the_loss(mpi, monkeypatch):
    monkeypatch.setenv("HVDLITE_HOST_RANKS", "2,1")
    assert len(steps(run(mpi, "-np", "3"))) == 3


@pytest.mark.wide
def test_a_slow_worker_makes_fewer_steps(mpi):
    by_worker = steps(run(mpi, "-np", "3", "--servers", "1", arguments=("--slow", "0.2")))
    assert by_worker[1] < by_worker[0]
