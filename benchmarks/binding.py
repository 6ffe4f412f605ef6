"""Measures what binding gains: a training step of ranks that hvdrun binds, and of ranks bound
otherwise.

    python -m benchmarks.binding [--ranks 2] [--task mlp] [--rounds 5]

The ways take turns, a job each, in every round. A step's time is that of the slowest rank; a job's
is the median over its steps; the figure is the median over the rounds, with the least and the most.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import torch
from torch.nn.functional import cross_entropy

import hvdlite as hvd
from benchmarks.figures import slowest
from benchmarks.networks import TASKS, Task, batch

WARM_UP_STEPS = 10
LIMIT_S = 300.0
# By name: options of hvdrun, and what the user's environment says. Without a number of threads in
# it hvdrun or `init` chooses one.
NOT_BOUND = ("--binding-args", "--bind-to none")
WAYS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "hvdrun": ((), {}),
    "not bound": (NOT_BOUND, {}),
    "not bound, a thread per core in each rank": (
        NOT_BOUND,
        {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))},
    ),
    "bound to one core, a thread per core in each rank": (
        ("--binding-args", "--bind-to core"),
        {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))},
    ),
}


def train(task: Task, steps: int) -> list[float]:
    """Seconds per step, of this rank; every rank of the job calls it."""
    hvd.init()
    network = task.network()
    optimizer = hvd.DistributedOptimizer(
        task.make_optimizer(network.parameters()), named_parameters=network.named_parameters()
    )
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    times_s = []
    for step in range(WARM_UP_STEPS + steps):
        samples, labels = batch(task, step, hvd.rank(), hvd.size())
        hvd.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        cross_entropy(network(samples), labels).backward()
        optimizer.step()
        times_s.append(time.perf_counter() - begin)
    return times_s[WARM_UP_STEPS:]


def time_job(way: str, ranks: int, task: str, steps: int) -> float:
    """The median step of one job, in seconds."""
    options, variables = WAYS[way]
    hvdrun = [sys.executable, "-m", "hvdrun", "-np", str(ranks), *options]
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    with tempfile.TemporaryDirectory(prefix="hvdlite-bench-") as folder:
        output = Path(folder, "result.json")
        program = [sys.executable, "-m", "benchmarks.binding", "--task", task]
        program += ["--steps", str(steps), "--worker", str(output)]
        subprocess.run(
            [*hvdrun, *program], env={**environ, **variables}, check=True, timeout=LIMIT_S
        )
        of_ranks: list[list[float]] = json.loads(output.read_text())
    return statistics.median(slowest(of_ranks))


@click.command(context_settings={"show_default": True})
@click.option("--ranks", default=2)
@click.option("--task", type=click.Choice(list(TASKS)), default="mlp")
@click.option("--steps", default=200, help="In each job, after some that don't count.")
@click.option("--rounds", default=5)
@click.option("--worker", metavar="FILE", hidden=True, help="Be a rank; rank 0 writes the times.")
def main(ranks: int, task: str, steps: int, rounds: int, worker: str | None) -> None:
    """Times a training step of ranks that are bound in several ways, or not at all."""
    if worker is not None:
        of_ranks = hvd.allgather_object(train(TASKS[task], steps))
        if hvd.rank() == 0:
            Path(worker).write_text(json.dumps(of_ranks))
        return
    times_s: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, times in times_s.items():
            times.append(time_job(way, ranks, task, steps))
    cores = len(os.sched_getaffinity(0))
    print(
        f"{TASKS[task].title}: {ranks} ranks, {cores} hardware threads, torch {torch.__version__}"
    )
    for way, times in times_s.items():
        low, high = min(times), max(times)
        middle = statistics.median(times)
        print(f"{1e3 * middle:8.2f} ms ({1e3 * low:.2f} to {1e3 * high:.2f})  {way}")


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.binding")
