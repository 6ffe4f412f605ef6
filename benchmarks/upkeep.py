"""What hvdlite costs while it does nothing: CPU time of a rank that is idle, or that waits.

Each is measured several times. Beside the CPU time of an idle rank stands how often its threads
have gone to sleep, and how often one came to a page that the kernel had taken away: where they
sleep as ever and the time is not as ever, it is the machine that was slow.
"""

import resource
import time
from typing import Any

import torch

import hvdlite as hvd
from benchmarks.plan import Plan

SETTLE_S = 0.2  # after an operation a rank looks around for a moment, and is not idle yet


def idle(seconds: float) -> dict[str, float]:
    """What this process does, all its threads, while it only sleeps: the CPU time that it uses, in
    seconds, how often a thread goes to sleep, and the page faults."""
    before, begin_s = resource.getrusage(resource.RUSAGE_SELF), time.process_time()
    time.sleep(seconds)
    used_s, after = time.process_time() - begin_s, resource.getrusage(resource.RUSAGE_SELF)
    return {
        "cpu_s": used_s,
        "sleeps": after.ru_nvcsw - before.ru_nvcsw,
        "faults": after.ru_minflt + after.ru_majflt - before.ru_minflt - before.ru_majflt,
    }


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
    """For each rank what each repetition has found, alike on every rank. Before anything else has
    threads in the process. Collective."""
    hvd.allreduce_(torch.ones(1024), op=hvd.Sum, name="late")
    comm.Barrier()
    time.sleep(SETTLE_S)
    times = range(plan.upkeep_times)
    idling = comm.allgather([idle(plan.idle_s) for _ in times])
    late_rank = comm.size - 1
    shares = comm.allgather([waiting_share(plan.late_s, late_rank, comm) for _ in times])
    return {
        "idle_for_s": plan.idle_s,
        "idle": idling,
        "waiting_share": [shares[rank] for rank in range(comm.size) if rank != late_rank],
    }
