"""Signals to hvdrun become hvd.preempted() in the ranks, which save and leave: for real."""

import os
import signal
import textwrap

import pytest

from hvdrun.command_line.cli import main
from tests.launcher.running.test_signals import start  # noqa: F401

# Rank 0 has a DataLoader's worker, which it needs until it has left the loop. "up" comes when all
# ranks can take the signal.
TRAINS = """
    import os, time, torch
    import hvdlite.torch as hvd
    from torch.utils.data import DataLoader
    hvd.init()
    hvd.preempted()
    hvd.barrier()
    data = torch.arange(100_000.0)
    loader = DataLoader(data, num_workers=1 if hvd.rank() == 0 else 0)
    print("up")
    for step, batch in enumerate(loader):
        hvd.allreduce(batch)
        if hvd.preempted():
            print("saved at", step)
            time.sleep(hvd.rank())
            break
        time.sleep(0.01)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=str)
@pytest.mark.wide_in("openmpi")
def test_ranks_save_at_the_same_step_and_leave_in_order(start, number):  # noqa: F811
    job = start(TRAINS).up()
    job.send(number)
    code, out, err = job.ends()
    assert code == 143
    steps = [line.removeprefix(f"[{rank}] saved at ") for rank, line in enumerate(out)]
    assert steps[0].isdigit()
    assert steps == [steps[0]] * 2, (out, err)
    assert "hvdrun: the job was preempted: hvd.preempted() has told the ranks, and all" in err
    assert "Traceback" not in err
    assert ("the 2 ranks have 20 s to end" in err) == (number == signal.SIGTERM)


FOR_ONE = """
    import os, signal, sys
    import hvdlite as hvd
    hvd.init()
    hvd.preempted()
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    while not hvd.preempted():
        pass
    {}
"""


DUMPS = """
    import faulthandler, signal, time
    import hvdlite as hvd
    faulthandler.register(signal.SIGUSR1)
    hvd.init()
    hvd.preempted()
    hvd.barrier()
    print("up")
    while not hvd.preempted():
        pass
    time.sleep(3)  # the other rank may get the signal a little later
"""


def test_faulthandler_shows_the_stacks_as_before(start):  # noqa: F811
    """MPICH's own handler stands before it, and calls it."""
    job = start(DUMPS).up()
    job.send(signal.SIGUSR1)
    code, _, err = job.ends()
    assert code == 143, err
    assert err.count("(most recent call first)") == 2, err
    assert "was sent to" not in err


EVALUATES = """
    import os, signal, subprocess, sys
    import hvdlite as hvd
    hvd.init()
    assert not hvd.preempted()
    if sys.argv[1:]:
        os.kill(os.getpid(), signal.SIGTERM)
        assert hvd.preempted()
    else:
        subprocess.run([sys.executable, sys.argv[0], "as a child"], close_fds=False, check=True)
"""


@pytest.mark.wide_in("openmpi")
def test_the_end_of_a_ranks_child_is_not_the_jobs(start, tmp_path):  # noqa: F811
    program = tmp_path / "evaluates.py"
    program.write_text(textwrap.dedent(EVALUATES))
    job = start(f"import runpy, sys; sys.argv = [{str(program)!r}]; runpy.run_path(sys.argv[0])")
    job.family = []
    code, _, err = job.ends()
    assert code == 0, err
    assert "preempted" not in err


@pytest.fixture
def in_slurm(monkeypatch, tmp_path):
    """A job of Slurm with a scontrol that notes in this folder what it is asked."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho $@ >> {tmp_path}/asked\n")
    (tmp_path / "scontrol").chmod(0o755)
    return tmp_path


@pytest.mark.wide_in("mpich")
def test_a_signal_to_one_rank_ends_all_and_slurm_is_asked(start, in_slurm):  # noqa: F811
    folder = in_slurm
    job = start(FOR_ONE.format(""), "--requeue")
    job.family = []
    code, out, err = job.ends()
    assert (code, out) == (143, [])
    assert f"hvdrun: the job will run again: `{folder}/scontrol requeue 7`\n" in err
    assert (folder / "asked").read_text() == "show job 7\nrequeue 7\n"


@pytest.mark.wide
def test_a_job_that_fails_afterwards_does_not_run_again(start, in_slurm):  # noqa: F811
    folder = in_slurm
    job = start(FOR_ONE.format("sys.exit(3 * hvd.rank())"), "--requeue")
    job.family = []
    code, _, err = job.ends()
    assert code == 3
    assert "hvdrun: the job is not requeued, as it has failed" in err
    assert not (folder / "asked").exists()


def test_requeue_outside_of_slurm_is_an_error(monkeypatch, capsys):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert main(["-np", "1", "--requeue", "true"]) == 64
    assert capsys.readouterr().err == (
        "hvdrun: --requeue asks Slurm to run this job again, but SLURM_JOB_ID is not set: hvdrun"
        " does not run inside a job of Slurm; leave --requeue out, or start hvdrun in a script for"
        " sbatch\n"
    )


def test_requeue_without_scontrol_is_an_error(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["-np", "1", "--requeue", "true"]) == 64
    assert "--requeue: scontrol, which asks Slurm, is not in PATH" in capsys.readouterr().err
