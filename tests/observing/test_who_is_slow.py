"""hvdrun names the rank that is steadily late, its host and the cause, and nobody else."""

import json
import re
import subprocess

import pytest

from tests.harness.programs import run_program
from tests.harness.worlds import end_tree, python_of
from tests.launcher.reports.test_prometheus import read

# Who is late sleeps 0.1 s in each step, a hundred times as long as the rest of a step takes.
TRAINS = """
import sys, time
import torch
from torch.utils.data import DataLoader, Dataset
import hvdlite as hvd

where, who, steps, *how = sys.argv[1:]
hvd.init()

def comes(place, step):
    late = step % hvd.size() if who == "in turns" else int(who)
    if (where, hvd.rank()) == (place, late):
        time.sleep(0.1)

class Data(Dataset):
    def __len__(self):
        return int(steps)
    def __getitem__(self, index):
        comes("data", index)
        return torch.ones(4)

model = torch.nn.Linear(4, 1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for step, batch in enumerate(DataLoader(Data())):
    optimizer.zero_grad()
    loss = model(batch).sum()
    comes("forward", step)
    if "polls" in how:
        handle = hvd.allreduce_async(loss.detach(), name="loss")
        while not hvd.poll(handle):
            time.sleep(0.001)
    loss.backward()
    optimizer.step()
"""
LATE = r"rank {rank} on localhost arrives last in \d+ % of steps, by \d+ ms: {cause} \(.*\)"


def verdict_of(mpi, where, who, *options, how=()):
    python = python_of(mpi)
    hvdrun = [python, "-m", "hvdrun", "-np", "2", "--summary", *options]
    done = run_program([*hvdrun, python, "-c", TRAINS, where, who, "24", *how], 90)
    assert done.code == 0, done
    return done.stderr.splitlines()[-1].removeprefix("hvdrun: ")


@pytest.mark.parametrize(
    ("mpi", "where", "rank", "cause", "options"),
    [
        ("openmpi", "data", "1", "its DataLoader", ()),
        ("mpich", "forward", "0", "it computes longer", ("-x", "HVDLITE_HOST_RANKS=1,1")),
    ],
)
def test_the_late_rank_is_named_with_the_cause(mpi, where, rank, cause, options):
    verdict = verdict_of(mpi, where, rank, *options)
    assert re.fullmatch(LATE.format(rank=rank, cause=cause), verdict), verdict


def test_a_rank_that_polls_for_the_late_one_is_not_named():
    verdict = verdict_of("openmpi", "forward", "1", how=["polls"])
    assert re.fullmatch(LATE.format(rank=1, cause="it computes longer"), verdict), verdict


def test_nobody_is_named_if_the_ranks_are_late_in_turns(tmp_path):
    path, folder = tmp_path / "job.prom", tmp_path / "out"
    files = "--metrics-file", str(path), "--output-dir", str(folder)
    verdict = verdict_of("openmpi", "forward", "in turns", *files)
    assert verdict.startswith("no rank is steadily late: the others wait most for rank "), verdict
    # The figures stay behind.
    values = read(path.read_text())
    steps = {dict(labels)["rank"]: n for (name, labels), n in values.items() if "_steps_" in name}
    assert steps == {"0": 24, "1": 24}
    assert [n for (name, _), n in values.items() if name == "hvdlite_running"] == [0]
    figures = json.loads((folder / "metrics.json").read_text())
    assert figures["whole"]["verdicts"] == [verdict]


def test_a_running_job_can_be_asked():
    python = python_of("openmpi")
    hvdrun = [python, "-m", "hvdrun"]
    job = [*hvdrun, "-np", "2", "--summary", python, "-c", TRAINS, "forward", "1", "3000"]
    with subprocess.Popen(job, stdin=subprocess.DEVNULL, start_new_session=True) as process:
        try:
            answer = ""
            # It trains for five minutes, and tells every 5 s.
            while process.poll() is None and "arrives last" not in answer:
                done = run_program([*hvdrun, "--metrics", str(process.pid)], 60)
                answer = done.stdout
            done = run_program([*hvdrun, "--metrics", str(process.pid), "--json"], 60)
        finally:
            end_tree(process)
    line, head, titles, *rows, verdict = answer.splitlines()
    assert re.match(r"\d+ steps, \d+ ms each; ", line), answer
    assert head == "where the time of a step goes, in ms:"
    assert titles.split()[:3] == ["rank", "host", "steps"]
    assert [row.split()[:2] for row in rows] == [["0", "localhost"], ["1", "localhost"]]
    assert re.fullmatch(LATE.format(rank="1", cause="it computes longer"), verdict), verdict
    figures = json.loads(done.stdout)
    assert figures["size"] == 2
    (late,) = figures["whole"]["late"]
    assert (late["ranks"], late["hosts"], late["cause"]) == ([1], ["localhost"], "computing")
