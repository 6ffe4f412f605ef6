"""Measures the smallest allreduce, and the CPU time of an idle rank. On any hosts:

    hvdrun -np 2 python -m benchmarks.latency
    hvdrun -H server1:1,server2:1 python -m benchmarks.latency

Rank 0 prints a table: an allreduce of 8 bytes (two float32, sum) in each of its forms, beside
mpi4py's and Gloo's, alternating in the same processes. Before each timing stands a barrier; a time
is that of the slowest rank, the median over the rounds.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import hvdlite as hvd
from benchmarks.figures import slowest
from benchmarks.plan import rotated
from benchmarks.upkeep import idle

ROUNDS = 50
CALLS = 20  # of one form, in one timing
GROUP = 100
IDLE_S = 10.0

Form = Callable[[], None]


def checked(tensor: torch.Tensor) -> None:
    """Raises where it is not the sum of ones."""
    if not tensor.eq(hvd.size()).all():
        raise AssertionError(f"rank {hvd.rank()}: got {tensor.tolist()}, expected {hvd.size()}")


def forms(mpi: Any, comm: Any) -> dict[str, Form]:
    """Each does one allreduce, or one group of them; by the name in the table."""
    ones = torch.ones(2)
    place = torch.ones(2)
    group = [torch.ones(2) for _ in range(GROUP)]

    def cached() -> None:
        checked(hvd.allreduce(ones, op=hvd.Sum, name="cached"))

    def unnamed() -> None:
        checked(hvd.allreduce(ones, op=hvd.Sum))

    def in_place() -> None:
        checked(hvd.allreduce_(place.fill_(1.0), op=hvd.Sum, name="in place"))

    def grouped() -> None:
        checked(hvd.grouped_allreduce(group, op=hvd.Sum, name="group")[-1])

    def plain_mpi() -> None:
        comm.Allreduce(mpi.IN_PLACE, [place.fill_(1.0).numpy(), 2, mpi.FLOAT], mpi.SUM)
        checked(place)

    def gloo() -> None:
        dist.all_reduce(place.fill_(1.0))
        checked(place)

    return {
        "hvdlite, allreduce by name": cached,
        "hvdlite, allreduce without a name": unnamed,
        "hvdlite, allreduce_ (in place)": in_place,
        f"hvdlite, grouped_allreduce of {GROUP}": grouped,
        "mpi4py, Allreduce": plain_mpi,
        "Gloo, all_reduce": gloo,
    }


def seconds_of(form: Form, calls: int, comm: Any) -> float:
    comm.Barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        form()
    return (time.perf_counter() - begin) / calls


def first_calls_s(comm: Any, rounds: int) -> list[float]:
    """Each with a name that was never used before."""
    ones = torch.ones(2)
    times_s = []
    for i in range(rounds):
        comm.Barrier()
        begin = time.perf_counter()
        hvd.allreduce(ones, op=hvd.Sum, name=f"first.{i}")
        times_s.append(time.perf_counter() - begin)
    return times_s


def measure(comm: Any, mpi: Any, rounds: int) -> dict[str, float]:
    """Seconds by form, on every rank alike."""
    times_s: dict[str, list[float]] = {
        "hvdlite, allreduce, first of its name": first_calls_s(comm, rounds)
    }
    every = forms(mpi, comm)
    for form in every.values():
        seconds_of(form, CALLS, comm)  # the first calls make connections
    for round_ in range(rounds):
        for name in rotated(list(every), round_):
            times_s.setdefault(name, []).append(seconds_of(every[name], CALLS, comm))
    of_ranks = comm.allgather(times_s)
    return {name: statistics.median(slowest([of[name] for of in of_ranks])) for name in of_ranks[0]}


def main() -> None:
    quick = "--quick" in sys.argv[1:]  # a look, no figures
    idle_for_s = 1.0 if quick else IDLE_S
    hvd.init()
    from mpi4py import MPI

    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD.Dup()
    # Before Gloo, whose threads would be counted too.
    idle_s = comm.allgather(idle(idle_for_s)["cpu_s"])
    dist.init_process_group("gloo", rank=hvd.rank(), world_size=hvd.size())
    medians_s = measure(comm, MPI, 3 if quick else ROUNDS)
    if hvd.rank() == 0:
        table = Table(
            title=f"8 bytes, {hvd.size()} ranks on {hvd.cross_size()} hosts (load "
            f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)"
        )
        table.add_column("operation")
        table.add_column("median, us", justify="right")
        for name, seconds in medians_s.items():
            table.add_row(name, f"{seconds * 1e6:.1f}")
        console = Console()
        console.print(table)
        console.print(
            f"CPU time in {idle_for_s:g} s of an idle rank, by rank: "
            + ", ".join(f"{seconds * 1e3:.2f} ms" for seconds in idle_s)
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
