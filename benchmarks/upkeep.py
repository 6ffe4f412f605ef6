"""What hvdlite costs while it does nothing: CPU time of a rank that is idle, or that waits."""

import time
from typing import Any

import torch

import hvdlite as hvd
from benchmarks.plan import Plan

SETTLE_S = 0.2  # after an operation a rank looks around for a moment, and is not idle yet


def idle_cpu_s(seconds: float) -> float:
    """The CPU time that this process uses, all its threads, while it only sleeps."""
    before = time.process_time()
    time.sleep(seconds)
    return time.process_time() - before


def waiting_share(late_s: float, late_rank: int, comm: Any) -> float | None:
    """Which part of a core this rank uses while it waits for the late one; None on that one."""
    ones = torch.ones(1024)
    comm.Barrier()
    before, begin = time.process_time(), time.perf_counter()
    if comm.rank == late_rank:
        time.sleep(late_s)
    hvd.allreduce_(ones, op=hvd.Sum, name="late")
    used_s, elapsed_s = time.process_time() - before, time.perf_counter() - begin
    if not ones.eq(comm.size).all():
        raise AssertionError(f"rank {comm.rank}: got {ones[0]}, expected {comm.size}")
    return None if comm.rank == late_rank else used_s / elapsed_s


def measure(plan: Plan, comm: Any) -> dict[str, Any]:
    """By rank, alike on every rank. Before anything else has threads in the process. Collective."""
    hvd.allreduce_(torch.ones(1024), op=hvd.Sum, name="late")
    comm.Barrier()
    time.sleep(SETTLE_S)
    idle_s = comm.allgather(idle_cpu_s(plan.idle_s))
    shares = comm.allgather(waiting_share(plan.late_s, comm.size - 1, comm))
    return {
        "idle_for_s": plan.idle_s,
        "idle_cpu_s": idle_s,
        "waiting_share": [share for share in shares if share is not None],
    }
