"""What each rank of a benchmark runs; the command in __main__.py starts it with hvdrun.

    python -m benchmarks.worker '{"plan": {...}, "thread_level": "multiple", "output": "FILE"}'

Rank 0 writes the figures to FILE.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mpi4py
import torch
import torch.distributed as dist

import hvdlite as hvd
from benchmarks import allreduce, training
from benchmarks.figures import medians, size_text, slowest
from benchmarks.plan import Plan


def summary(times_s: dict[str, list[float]], comm: Any) -> dict[str, float]:
    """The median over the rounds of the slowest rank's time, by contender."""
    of_ranks = comm.allgather(times_s)
    return medians({name: slowest([of[name] for of in of_ranks]) for name in times_s})


def measure(plan: Plan, comm: Any, mpi: Any) -> dict[str, Any]:
    def progress(text: str) -> None:
        if comm.rank == 0:
            print(f"  {comm.size} ranks, {text}", file=sys.stderr, flush=True)

    rows, steps = [], []
    for size_bytes in plan.sizes_bytes:
        progress(f"allreduce of {size_text(size_bytes)}")
        times_s = allreduce.time_size(
            size_bytes, plan.max_rounds, comm, allreduce.contenders(mpi, comm)
        )
        rows.append({"bytes": size_bytes, "median_s": summary(times_s, comm)})
    for name in plan.tasks:
        task = training.TASKS[name]
        progress(f"training step of {task.title}")
        times_s = training.time_task(task, plan.max_rounds, comm, training.contenders(mpi, comm))
        steps.append({"task": task.title, "median_s": summary(times_s, comm)})
    return {"plan": asdict(plan), "allreduce": rows, "training": steps}


def main() -> None:
    request = json.loads(sys.argv[1])
    mpi4py.rc.thread_level = request["thread_level"]  # counts until MPI is initialized
    hvd.init()
    from mpi4py import MPI  # initializes MPI, unless hvd.init has

    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD.Dup()
    output = Path(request["output"])
    dist.init_process_group(  # torch's default group; its ranks meet in a file beside the output
        "gloo",
        init_method=output.with_name("gloo").as_uri(),
        rank=comm.rank,
        world_size=comm.size,
    )
    vendor, version = MPI.get_vendor()
    levels = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    result = {
        "ranks": comm.size,
        "mpi": f"{vendor} {'.'.join(map(str, version))}",
        "mpi_thread_level": levels[MPI.Query_thread()],
        **measure(Plan(**request["plan"]), comm, MPI),
    }
    if comm.rank == 0:
        output.write_text(json.dumps(result))
    dist.destroy_process_group()
    comm.Free()


if __name__ == "__main__":
    main()
