"""hvdlite on several hosts: the collectives against the oracles, a training run, a failing rank."""

import textwrap

import pytest

from tests.examples import test_shared

pytestmark = pytest.mark.rig

TWO = "server1:1,server2:1"
EQUAL, UNEQUAL = "server1:2,server2:2", "server1:3,server2:1"
THREE = "server1:1,server2:2,server3:1"


@pytest.mark.wide
@pytest.mark.above_mpi
@pytest.mark.parametrize("hosts", [THREE, EQUAL, UNEQUAL])
def test_the_collectives_agree_with_the_oracles(hvdrun, python, hosts):
    done = hvdrun("-H", hosts, python, "-m", "tests.rig.collectives")
    assert done.code == 0, done
    assert done.stdout.count("collectives agree") == 4, done


@pytest.mark.wide_in("mpich")
def test_the_digits_are_learned_across_hosts(hvdrun, python):
    options = ("--epochs", "5", "--expect-accuracy", "90")
    done = hvdrun("-H", TWO, python, "examples/digits.py", *options)
    assert done.code == 0, done
    assert "Trained on 2 rank(s)" in done.stdout


@pytest.mark.wide
@pytest.mark.above_mpi
@pytest.mark.parametrize("hosts", [EQUAL, UNEQUAL])
def test_they_are_learned_as_well_as_on_one_host(hvdrun, python, hosts):
    done = hvdrun("-H", hosts, python, "examples/digits.py", "--expect-accuracy", "97")
    assert done.code == 0, done
    assert "Trained on 4 rank(s)" in done.stdout


@pytest.mark.wide
def test_a_rank_that_raises_on_another_host_ends_the_job(hvdrun, python):
    text = """
        import hvdlite as hvd, torch
        hvd.init()
        hvd.allreduce(torch.ones(3))
        if hvd.rank() == 1:
            raise ArithmeticError("the loss is not a number")
        hvd.allreduce(torch.ones(3))
    """
    done = hvdrun("-H", TWO, python, "-c", textwrap.dedent(text))
    assert done.code == 1, done
    report = done.stderr[done.stderr.rindex("hvdrun: rank") :]
    assert report.startswith("hvdrun: rank 1 on server2 ended with exit code 1"), done
    assert "[1] ArithmeticError: the loss is not a number" in done.stderr, done


@pytest.mark.wide
def test_sys_exit_on_another_host_gives_its_code(hvdrun, python):
    text = """
        import hvdlite as hvd, torch, sys
        hvd.init()
        if hvd.rank() == 1:
            sys.exit(3)
        hvd.allreduce(torch.ones(3))
    """
    done = hvdrun("-H", TWO, python, "-c", textwrap.dedent(text))
    assert done.code == 3, done
    assert "rank 1 on server2 ended with exit code 3" in done.stderr, done


@pytest.mark.wide_in("mpich")
def test_servers_spread_over_the_hosts(hvdrun, python):
    program = (python, "examples/asynchronous.py", "--steps", "300", "--expect-loss", "1.0")
    done = hvdrun("-H", EQUAL, "--servers", "2", *program)
    assert done.code == 0, done
    assert "Steps of each worker: [" in done.stdout


@pytest.mark.wide_in("mpich")
def test_each_host_has_one_copy_and_half_of_the_state(hvdrun, python):
    test_shared.check(hvdrun("-H", TWO, python, "examples/shared.py", *test_shared.ARGUMENTS))
