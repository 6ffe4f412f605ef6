"""Signals to hvdrun, and what they do to ranks on several hosts."""

import pytest

from tests.rig.conftest import job
from tests.rig.test_failures import HOSTS, LIMIT_S, SIZE, to_hvdrun

pytestmark = [pytest.mark.rig, pytest.mark.long]

# Rank 3, on the other host, takes longer to end than the others.
JOB = """
import os, signal, sys, time
{start}
rank = int(os.environ["RANK"])
if rank % 2:
    signal.signal(signal.SIGUSR2, lambda *_: print("got it"))
if rank == 3:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
try:
    print("up")
    {wait}
    time.sleep(90)
finally:
    if rank == 3:
        time.sleep(4)
    print("cleaned up")
"""
MPI = "from mpi4py import MPI", ""
HVDLITE = "import torch, hvdlite as hvd; hvd.init()", "rank and hvd.allreduce(torch.ones(1))"


@pytest.fixture
def running(rig, python, request):
    begin, wait = request.param
    hvdrun = [python.with_name("hvdrun"), "-H", HOSTS, "--grace-period", "30"]
    command = [*hvdrun, python, "-u", "-c", JOB.format(start=begin, wait=wait)]
    with job(rig.inside("server1", *command), SIZE) as process:
        yield process


@pytest.mark.parametrize("running", [MPI], ids=["MPI"], indirect=True)
def test_usr2_goes_to_the_ranks_of_all_hosts_that_handle_it(running, rig):
    to_hvdrun("USR2")(rig)  # not USR1, for which MPICH has a handler
    for _ in range(2):
        assert running.stdout.readline().endswith("got it\n")
    assert running.stderr.readline() == (
        "hvdrun: SIGUSR2 was sent to 2 of 4 ranks; ranks 0 and 2 have no handler for it, which"
        " would have ended them\n"
    )
    assert running.poll() is None
    to_hvdrun("INT")(rig)
    assert running.wait(LIMIT_S) == 130


@pytest.mark.parametrize("running", [MPI, HVDLITE], ids=["MPI", "hvdlite"], indirect=True)
def test_ctrl_c_runs_finally_on_every_host(running, rig):
    to_hvdrun("INT")(rig)
    said, err = running.communicate(timeout=LIMIT_S)
    assert running.returncode == 130
    assert sorted(said.splitlines()) == [f"[{rank}] cleaned up" for rank in range(SIZE)], err
    assert "hvdrun: Ctrl-C: the 4 ranks have 30 s to end" in err
    rig.assert_nothing_left()


@pytest.mark.parametrize("running", [HVDLITE], ids=["hvdlite"], indirect=True)
def test_a_rank_saves_after_term_though_the_others_end_at_once(running, rig):
    to_hvdrun("TERM")(rig)
    said, err = running.communicate(timeout=LIMIT_S)
    assert running.returncode == 143
    assert said.splitlines() == ["[3] cleaned up"], err
    rig.assert_nothing_left()
