"""The program that each rank of a benchmark runs; starting.py starts it with hvdrun.

    python -m benchmarks.worker '{"plan": {...}, "job": {...}, "output": "FILE"}'

Rank 0 writes the figures to FILE.
"""

import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mpi4py
import torch
import torch.distributed as dist

import hvdlite as hvd
from benchmarks import (
    allreduce,
    c10d,
    halves,
    sharded,
    tail,
    training,
    upkeep,
    weighted,
    wrapped,
)
from benchmarks.figures import (
    FLOOR,
    GLOO,
    IDLE,
    OURS,
    PASSES,
    histogram,
    medians,
    percentiles,
    size_text,
    slowest,
)
from benchmarks.groups import busy_groups, make_groups
from benchmarks.networks import TASKS
from benchmarks.plan import Job, Plan, job_from, plan_from
from benchmarks.streams import Streams


@dataclass(frozen=True)
class Bench:
    """What the parts of a benchmark need."""

    plan: Plan
    job: Job
    comm: Any
    mpi: Any
    mpi_name: str
    streams: Streams | None  # where there are several hosts

    def progress(self, text: str) -> None:
        if self.comm.rank == 0:
            print(f"  {self.job.place}, {self.mpi_name}: {text}", file=sys.stderr, flush=True)

    def summary(self, times_s: dict[str, list[float]]) -> dict[str, Any]:
        """Over the rounds, the slowest rank's time in each, by contender."""
        of_ranks = self.comm.allgather(times_s)
        rounds = {name: slowest([of[name] for of in of_ranks]) for name in times_s}
        return {
            "median_s": medians(rounds),
            "p90_s": {name: percentiles(times)[1] for name, times in rounds.items()},
            "rounds": min(map(len, rounds.values())),
        }

    def cores(
        self, times_s: dict[str, list[float]], cpu_s: dict[str, list[float]] | None
    ) -> dict[str, Any]:
        """How many cores all ranks together keep busy during a call, by contender; cpu_s None:
        nothing."""
        if cpu_s is None:
            return {}
        of_ranks = self.comm.allgather((times_s, cpu_s))
        busy = {
            name: sum(statistics.median(cpu[name]) for _, cpu in of_ranks)
            / statistics.median(slowest([times[name] for times, _ in of_ranks]))
            for name in times_s
        }
        return {"cores": busy}


def measure_upkeep(bench: Bench) -> dict[str, Any]:
    bench.progress("CPU time of ranks that are idle or wait")
    return upkeep.measure(bench.plan, bench.comm)


def measure_allreduce(bench: Bench) -> list[dict[str, Any]]:
    contenders = {
        **allreduce.peers(bench.mpi, bench.comm, bench.mpi_name),
        **(allreduce.plans() if bench.streams else {}),
    }
    effort = bench.plan.allreduce if bench.streams is None else bench.plan.between
    rows = []
    for size_bytes in bench.job.sizes_bytes:
        bench.progress(f"allreduce of {size_text(size_bytes)}")
        cpu_s: dict[str, list[float]] | None = {} if bench.streams else None
        bounds = allreduce.bounds(bench.streams, size_bytes, bench.job.place.ranks)
        times_s = allreduce.time_count(
            size_bytes // 4, effort, bench.comm, {**contenders, **bounds}, cpu_s
        )
        rows.append({"bytes": size_bytes, **bench.summary(times_s), **bench.cores(times_s, cpu_s)})
    return rows


def measure_halves(bench: Bench) -> list[dict[str, Any]]:
    """Of large tensors: small ones are limited by the number of messages, not by their bytes."""
    rows = []
    for size_bytes in bench.job.sizes_bytes:
        if size_bytes < bench.plan.halves_from_bytes:
            continue
        bench.progress(f"reducescatter of {size_text(size_bytes)}")
        times_s, sent_bytes = halves.time_halves(size_bytes, bench.plan.between, bench.comm)
        of_ranks = bench.comm.allgather(sent_bytes)
        sent = {name: sum(of[name] for of in of_ranks) for name in sent_bytes}
        rows.append({"bytes": size_bytes, **bench.summary(times_s), "sent_bytes": sent})
    return rows


def measure_types(bench: Bench) -> list[dict[str, Any]]:
    rows = []
    for size_bytes in bench.plan.types_bytes:
        bench.progress(f"as many elements of 16 bits as {size_text(size_bytes)} of float32 have")
        times_s = allreduce.time_count(
            size_bytes // 4,
            bench.plan.allreduce,
            bench.comm,
            allreduce.types(bench.job.place.ranks),
        )
        ours, bounds = (
            bench.summary({dtype: s for (dtype, who), s in times_s.items() if who == wanted})
            for wanted in (OURS, PASSES)
        )
        rows.append({"elements": size_bytes // 4, **ours, "passes_s": bounds["median_s"]})
    return rows


def measure_tail(bench: Bench) -> list[dict[str, Any]]:
    contenders = allreduce.peers(bench.mpi, bench.comm, bench.mpi_name)
    rows = []
    for size_bytes in bench.plan.tail_bytes:
        for situation in tail.SITUATIONS:
            bench.progress(f"single allreduces of {size_text(size_bytes)}, {situation}")
            times_s = tail.time_calls(
                size_bytes // 4, bench.plan.tail, bench.comm, contenders, situation
            )
            for name, times in times_s.items():
                rows.append(
                    {
                        "bytes": size_bytes,
                        "situation": situation,
                        "contender": name,
                        "calls": len(times),
                        "percentiles_s": percentiles(times),
                        "histogram": histogram(times),
                    }
                )
    return rows


def measure_training(bench: Bench) -> list[dict[str, Any]]:
    rows = []
    for name in bench.plan.tasks:
        task = TASKS[name]
        bench.progress(f"training step of {task.title}")
        contenders = training.contenders(bench.mpi, bench.comm)
        times_s = training.time_task(task, bench.plan.training, bench.comm, contenders)
        rows.append({"task": name, "title": task.title, **bench.summary(times_s)})
    return rows


def measure_c10d(bench: Bench) -> list[dict[str, Any]]:
    groups = busy_groups()
    rows = []
    for operation, sizes_bytes in bench.plan.c10d:
        for size_bytes in sizes_bytes:
            bench.progress(f"{operation} of {size_text(size_bytes)}")
            times_s = c10d.time_operation(
                operation, size_bytes, bench.plan.c10d_effort, bench.comm, groups
            )
            rows.append({"operation": operation, "bytes": size_bytes, **bench.summary(times_s)})
    return rows


def measure_wrapped(bench: Bench) -> list[dict[str, Any]]:
    """On two ranks of one host all steps, elsewhere those of FSDP2."""
    groups = make_groups()
    everything = (bench.job.place.hosts, bench.job.place.ranks) == (1, 2)
    torch.set_flush_denormal(True)  # what no rank has sent may be any number
    rows = []
    for wrapper, name in bench.plan.wrapped:
        if wrapper == "FSDP2" or everything:
            task = TASKS[name]
            bench.progress(f"step of {wrapper}, {task.title}")
            times_s = training.time_task(
                task,
                bench.plan.wrapped_effort,
                bench.comm,
                wrapped.contenders(wrapper, groups),
                reference=GLOO,
                unchecked=(FLOOR, IDLE),
            )
            row = {"wrapper": wrapper, "task": name, "title": task.title}
            rows.append({**row, **bench.summary(times_s)})
    torch.set_flush_denormal(False)
    return rows


def measure_sharded(bench: Bench) -> list[dict[str, Any]]:
    task = TASKS["deep, Adam"]
    effort = bench.plan.sharded
    bench.progress(f"update of {task.title}")
    updates_s = bench.summary(sharded.time_updates(task, effort, bench.comm))
    bench.progress(f"step with a divided update, {task.title}")
    contenders = {**sharded.ours(), **sharded.peers(busy_groups()), FLOOR: training.Trainer}
    times_s = training.time_task(task, effort, bench.comm, contenders, reference=OURS)
    steps_s = bench.summary(times_s)
    return [{"title": task.title, "update_s": updates_s["median_s"], **steps_s}]


def measure_weighted(bench: Bench) -> list[dict[str, Any]]:
    task = TASKS["mlp"]
    bench.progress(f"step with weights, {task.title}")
    times_s = weighted.time_weights(task, bench.plan.weighted, bench.comm)
    return [{"title": task.title, **bench.summary(times_s)}]


# In this order; Gloo, whose threads would count, comes after the first.
PARTS = {
    "upkeep": measure_upkeep,
    "allreduce": measure_allreduce,
    "reducescatter": measure_halves,
    "tail": measure_tail,
    "types": measure_types,
    "training": measure_training,
    "sharded": measure_sharded,
    "weighted": measure_weighted,
    "c10d": measure_c10d,
    "wrapped": measure_wrapped,
}


def main() -> None:
    request = json.loads(sys.argv[1])
    plan, job = plan_from(request["plan"]), job_from(request["job"])
    output = Path(request["output"])
    mpi4py.rc.thread_level = job.flavour.thread_level  # counts until MPI is initialized
    hvd.init()
    from mpi4py import MPI  # initializes MPI, unless hvd.init has

    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD.Dup()
    vendor, version = MPI.get_vendor()
    serialized = MPI.Query_thread() == MPI.THREAD_SERIALIZED
    mpi_name = f"{vendor}, serialized" if serialized else vendor
    several = job.place.hosts > 1
    streams = (
        Streams(comm, hvd.cross_rank(), hvd.cross_size(), hvd.local_rank()) if several else None
    )
    bench = Bench(plan, job, comm, MPI, mpi_name, streams)
    result: dict[str, Any] = {
        "place": asdict(job.place),
        "mpi": mpi_name,
        "mpi_version": ".".join(map(str, version)),
    }
    for part, measure in PARTS.items():
        if part in job.parts:
            if part != "upkeep" and not dist.is_initialized():
                # torch's default group; its ranks meet in a file beside the output
                dist.init_process_group(
                    "gloo",
                    init_method=output.with_name("gloo").as_uri(),
                    rank=comm.rank,
                    world_size=comm.size,
                )
            result[part] = measure(bench)
            if comm.rank == 0:  # after each: what comes next may fail
                output.write_text(json.dumps(result))
    if dist.is_initialized():
        comm.Barrier()  # else Gloo may find a connection closed that it still reads from
        dist.destroy_process_group()
    if streams is not None:
        streams.close()
    comm.Free()


if __name__ == "__main__":
    main()
