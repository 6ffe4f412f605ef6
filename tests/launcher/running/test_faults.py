"""HVDLITE_FAULT under hvdrun: what becomes of the processes."""

import pytest

# Rank 1 is delayed, raises, stands still, and is killed; each time at the place that it is told.
SCRIPT = """
import os, signal, time
import torch
import hvdlite as hvd

hvd.init()
rank = hvd.rank()
pids = hvd.allgather(torch.tensor([os.getpid()])).tolist()
hvd.allreduce_(torch.ones(1), name="first")
began = time.monotonic()
hvd.allreduce_(torch.ones(1), name="second")
if rank == 1:
    print("late:", time.monotonic() - began >= 0.25)
    try:
        hvd.broadcast(torch.ones(1), 0, name="raises")
    except RuntimeError as error:
        print("raised:", error)
hvd.broadcast(torch.ones(1), 0, name="raises")
if rank == 0:
    while open(f"/proc/{pids[1]}/stat").read().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    print("rank 1 stands still")
    os.kill(pids[1], signal.SIGCONT)
hvd.allreduce(torch.ones(1), name="stands")
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for step in (1, 2, 3):
    model(torch.ones(2)).backward()
    optimizer.step()
    print("step", step)
"""
FAULTS = (
    "delay:0.25@rank=1,operation=allreduce,nth=2; raise@rank=1,operation=broadcast;"
    " stop@rank=1,name=stands; kill@rank=1,step=2"
)

pytestmark = pytest.mark.parametrize("python", ["mpich"], indirect=True)


def test_a_rank_is_late_raises_stands_still_and_is_killed_where_the_text_says(hvdrun, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = hvdrun("-np", "2", "-x", f"HVDLITE_FAULT={FAULTS}", "python", script)
    assert done.code == 137, done
    said = f"hvdrun: FAULTS ARE INJECTED: HVDLITE_FAULT makes this job fail on purpose: {FAULTS}\n"
    assert done.stderr.count(said) == 1, done
    assert done.of_rank(0).stdout.startswith("rank 1 stands still\nstep 1\n"), done
    assert done.of_rank(1).stdout == (
        "late: True\n"
        "raised: HVDLITE_FAULT has raised this on purpose: rank 1, broadcast 'raises'\n"
        "step 1\n"
    ), done
    happened = [
        line.partition("HVDLITE_FAULT: ")[2]
        for line in done.stderr.splitlines()
        if ", on purpose: " in line and "HVDLITE_FAULT: " in line
    ]
    assert happened == [
        "delay on rank 1, on purpose: allreduce 'second'",
        "raise on rank 1, on purpose: broadcast 'raises'",
        "stop on rank 1, on purpose: allreduce 'stands'",
        "kill on rank 1, on purpose: step 2 of SGD",
    ], done


def test_a_rank_ends_with_the_exit_code_that_an_inherited_variable_says(hvdrun, monkeypatch):
    monkeypatch.setenv("HVDLITE_FAULT", "exit:7@rank=1,operation=barrier,nth=2")
    program = "import hvdlite as hvd; hvd.init(); hvd.barrier(); print('one'); hvd.barrier()"
    done = hvdrun("-np", "2", "python", "-c", program)
    assert done.code == 7, done
    assert done.of_rank(1).stdout == "one\n", done
    assert "hvdrun: FAULTS ARE INJECTED: " in done.stderr, done


def test_a_wrong_text_is_refused_before_anything_starts(hvdrun, tmp_path):
    done = hvdrun("-np", "2", "-x", "HVDLITE_FAULT=explode", "touch", tmp_path / "started")
    assert done.code == 64, done
    assert "HVDLITE_FAULT: 'explode' is no kind of fault; expected one of bitflip" in done.stderr
    assert list(tmp_path.iterdir()) == []
