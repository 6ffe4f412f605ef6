"""Measures what hvdlite costs while it does nothing: the CPU time of a rank that is idle, or
that waits.

Each is measured several times. Beside the CPU time of an idle rank stands how often its threads
have slept, and what a program is charged with in the same seconds that sleeps as often and does
nothing: where that is not as ever, it is the machine that is slow.
"""

import resource
import subprocess
import sys
import time
from typing import Any

import torch

import hvdlite as hvd
from benchmarks.plan import Plan

SETTLE_S = 0.2  # after an operation a rank looks around for a moment, and is not idle yet
LOOK_S = 2.0  # how long an idle rank sleeps at a time (docs/design/core.md)

# Its arguments: for how long it sleeps, how often in a repetition, how many repetitions.
SLEEPER = """
import sys, time
seconds, sleeps, repetitions = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
for _ in range(repetitions):
    before = time.process_time()
    for _ in range(sleeps):
        time.sleep(seconds)
    print(time.process_time() - before)
"""


def start_sleeper(seconds: float, repetitions: int) -> subprocess.Popen[str]:
    """A program that sleeps as often as an idle rank and does nothing else. It writes the CPU time
    of each repetition."""
    sleeps = max(1, round(seconds / LOOK_S))
    words = map(str, (seconds / sleeps, sleeps, repetitions))
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", SLEEPER, *words], stdout=subprocess.PIPE, text=True
    )


def sleeps() -> int:
    """How often a thread of this process has gone to sleep so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw


def idle(seconds: float) -> dict[str, float]:
    """The CPU time in seconds that all threads of this process use while it only sleeps, and how
    often a thread goes to sleep."""
    before_s, slept_before = time.process_time(), sleeps()
    time.sleep(seconds)
    return {"cpu_s": time.process_time() - before_s, "sleeps": sleeps() - slept_before}


def waiting_share(late_s: float, late_rank: int, comm: Any) -> float | None:
    """The fraction of a core that this rank uses while it waits for the late one; None on the
    late one."""
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
    sleeper = start_sleeper(plan.idle_s, plan.upkeep_times)
    idling = comm.allgather([idle(plan.idle_s) for _ in times])
    slept, _ = sleeper.communicate()
    if sleeper.returncode:
        raise subprocess.CalledProcessError(sleeper.returncode, sleeper.args)
    late_rank = comm.size - 1
    shares = comm.allgather([waiting_share(plan.late_s, late_rank, comm) for _ in times])
    return {
        "idle_for_s": plan.idle_s,
        "idle": idling,
        "sleeper_cpu_s": comm.allgather([float(line) for line in slept.split()]),
        "waiting_share": [shares[rank] for rank in range(comm.size) if rank != late_rank],
    }
