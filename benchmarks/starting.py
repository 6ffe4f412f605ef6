"""Starts the workers of a run's jobs, one job after the other, and collects what they found."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks import asynchronous, copies, memory
from benchmarks.plan import SLOWEST, Job, Plan, request_of
from benchmarks.rig import ROOT, Rig, rig

LIMIT_S = 900.0  # of one command
RESULT = "result.json"
# Open MPI needs this where ranks outnumber the cores: it is twelve times faster with it, and more.
YIELDING = {"OMPI_MCA_mpi_yield_when_idle": "1"}

# The C library keeps what is freed. Else it gives memory back to the system and takes it again,
# page by page, in some training steps and not in others: more luck than contenders differ by.
KEEPING_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "4000000000", "MALLOC_MMAP_THRESHOLD_": "4000000000"}

# The opposite: what is freed is given back at once, so that memory in use is all that is counted.
GIVING_BACK_MEMORY = {"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}


def run(command: Sequence[str], variables: Mapping[str, str]) -> None:
    """Raises CalledProcessError or TimeoutExpired; hvdrun has said why."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    subprocess.run(command, env=env, cwd=ROOT, check=True, timeout=LIMIT_S)


@contextmanager
def noting(failed: list[str], what: str) -> Iterator[None]:
    """Notes a command that fails within, and goes on: a whole run takes long."""
    try:
        yield
    except subprocess.CalledProcessError as failure:
        failed.append(f"{what}: exit code {failure.returncode}")
    except subprocess.TimeoutExpired as failure:
        failed.append(f"{what}: no end after {failure.timeout:g} s")


def run_jobs(plan: Plan, jobs: Sequence[Job], failed: list[str]) -> list[dict[str, Any]]:
    """The results that rank 0 of each job wrote; notes a job that fails, and takes what it had."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hvdlite-bench-")))
        hosts, shaped = None, None
        results = []
        for number, job in enumerate(jobs):
            if job.place.hosts > 1 and hosts is None:
                most = max(job.place.hosts for job in jobs)
                hosts = stack.enter_context(rig(folder, most))
            if hosts is not None and job.place.rate != shaped:
                hosts.shape(job.place.rate)
                shaped = job.place.rate
            own = folder / ("share" if job.place.hosts > 1 else ".") / str(number)
            own.mkdir(parents=True)
            with noting(failed, f"{job.place}, {job.flavour}"):
                run_job(plan, job, own, hosts)
            if (written := own / RESULT).exists():
                results.append(json.loads(written.read_text()))
        return results


def run_job(plan: Plan, job: Job, folder: Path, hosts: Rig | None) -> None:
    output = folder / RESULT
    request = {**request_of(plan, job), "output": str(output)}
    python = job.flavour.python
    hvdrun = str(Path(python).with_name("hvdrun"))
    program = [python, "-m", "benchmarks.worker", json.dumps(request)]
    if job.place.hosts == 1:
        variables = {"GLOO_SOCKET_IFNAME": "lo", **KEEPING_MEMORY}
        run([hvdrun, "-np", str(job.place.ranks), *program], variables)
    else:
        assert hosts is not None
        command = hosts.command(job.place, [hvdrun, *program])
        # hvdrun knows nothing of the other hosts being this machine too.
        crowded = job.place.size > len(os.sched_getaffinity(0))
        run(command, {"GLOO_SOCKET_IFNAME": "eth0", **(YIELDING if crowded else {})})


def run_memory(python: str) -> dict[str, Any]:
    """PSS in bytes by variant and rank, 2 ranks on this host."""
    pss = {}
    for variant in memory.VARIANTS:
        print(f"  memory of a training step, {variant}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="hvdlite-bench-") as folder:
            request = json.dumps({"variant": variant, "folder": folder})
            hvdrun = str(Path(python).with_name("hvdrun"))
            command = [hvdrun, "-np", "2", python, "-m", "benchmarks.memory", request]
            run(command, {"GLOO_SOCKET_IFNAME": "lo"})
            pss[variant] = json.loads(Path(folder, "pss.json").read_text())
    return {"buckets_bytes": memory.gradient_bytes(), "pss_bytes": pss}


def run_copies(python: str, plan: Plan) -> dict[str, Any]:
    """PSS in bytes by variant and rank, beyond what the imports take, on this host."""
    pss = {}
    for variant, ranks in copies.VARIANTS.items():
        print(f"  memory of one copy per host: {variant}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="hvdlite-bench-") as folder:
            sizes = {"layers": plan.copied_layers, "dataset_bytes": plan.dataset_bytes}
            request = {"variant": variant, "folder": folder, **sizes}
            hvdrun = str(Path(python).with_name("hvdrun"))
            program = [python, "-m", "benchmarks.copies", json.dumps(request)]
            run([hvdrun, "-np", str(ranks), *program], {**YIELDING, **GIVING_BACK_MEMORY})
            pss[variant] = json.loads(Path(folder, "pss.json").read_text())
    return {
        "gradients_bytes": plan.copied_layers * copies.LAYER_BYTES,
        "dataset_bytes": plan.dataset_bytes,
        "pss_bytes": pss,
    }


def run_asynchronous(python: str, plan: Plan) -> dict[str, Any]:
    """Training with a server, and without waiting for a slow worker, on this host."""
    print("  asynchronous training", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="hvdlite-bench-") as folder:
        command = [str(Path(python).with_name("hvdrun")), "-np", str(asynchronous.PROCESSES)]
        return _run_asynchronous(command, python, plan, Path(folder), between=False)


def run_servers(python: str, plan: Plan) -> dict[str, Any]:
    """How much a server takes and gives whose host has the slowest link, and no worker."""
    print(f"  a server on another host, {SLOWEST}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="hvdlite-bench-") as folder:
        workers = asynchronous.PROCESSES - asynchronous.SERVERS
        ranks = [workers - workers // 2, workers // 2, asynchronous.SERVERS]
        with rig(Path(folder), len(ranks)) as hosts:
            hosts.shape(SLOWEST)
            command = hosts.command_on(ranks, [str(Path(python).with_name("hvdrun"))])
            found = _run_asynchronous(command, python, plan, Path(folder, "share"), between=True)
    return {**found, "rate": SLOWEST, "ranks": ranks}


def _run_asynchronous(
    hvdrun: Sequence[str], python: str, plan: Plan, folder: Path, between: bool
) -> dict[str, Any]:
    output = folder / "result.json"
    request = {
        "output": str(output),
        "seconds": plan.asynchronous_s,
        "loss": plan.asynchronous_loss,
        "between": between,
    }
    program = [python, "-m", "benchmarks.asynchronous", json.dumps(request)]
    run([*hvdrun, "--servers", str(asynchronous.SERVERS), *program], YIELDING)
    found: dict[str, Any] = json.loads(output.read_text())
    return found
