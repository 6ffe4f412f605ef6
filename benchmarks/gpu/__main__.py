"""The command: `make bench-gpu PYTHON=/path/to/python`, or

    python -m benchmarks.gpu [--device cpu] [--only TEXT] [--limit 190] [--output FILE]

One job after the other, as they would disturb each other; BENCH_S are the seconds that each
measures, beside its start. On one GPU the ranks share it, where only ratios within a job say
something.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import tables
from tests.gpu.with_gpu import preparing, starting
from tests.gpu.with_gpu.starting import World

KIB, MIB = 1 << 10, 1 << 20
SIZES_BYTES = (4 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
C10D = "benchmarks.gpu_c10d"
# The longest that a job may take beside what it measures.
START_S = 60.0


@dataclass(frozen=True)
class Job:
    """A program on all ranks of a world."""

    part: str
    title: str
    world: World
    command: tuple[str, ...]


def steps(network: str, samples: int, world: World, seconds: float, *contenders: str) -> Job:
    command = ("-m", "benchmarks.gpu.steps", network, str(samples), str(seconds), *contenders)
    return Job("steps", f"steps of {network}, {world.name}", world, command)


def operations(world: World, seconds: float, sizes: Sequence[int], *backends: str) -> Job:
    listed = ",".join(map(str, sizes))
    command = ("-m", "benchmarks.gpu.operations", str(seconds / len(sizes)), listed, *backends)
    return Job("operations", f"operations, {world.name}", world, command)


def c10d(world: World, device: str, seconds: float) -> Job:
    command = ("-m", C10D, device, str(seconds / 2))
    return Job("c10d", f"torch.distributed, {world.name}", world, command)


def plan(device: str, gpus: int, seconds: float) -> list[Job]:
    """What matters most comes first, as the time may be over before the end."""
    if device == "cpu":
        one, two = starting.worlds(device, gpus)
        return [
            operations(two, seconds, SIZES_BYTES[:2], "gloo"),
            steps("tiny", 64, two, seconds, "plain", "ddp:gloo", "hvdlite"),
            c10d(two, device, seconds),
            steps("tiny", 64, one, seconds, "plain", "ddp:gloo", "hvdlite"),
        ]
    one, staged, nccl = starting.worlds(device, gpus)
    return [
        operations(staged, seconds, SIZES_BYTES, "gloo"),
        steps("gpt", 8, nccl, seconds, "plain", "ddp:nccl", "hvdlite"),
        c10d(nccl, device, seconds),
        steps("gpt", 16, one, seconds, "plain", "ddp:nccl", "hvdlite"),
        steps("gpt", 8, staged, seconds, "ddp:gloo", "hvdlite"),
        operations(nccl, seconds, SIZES_BYTES, "nccl"),
        steps("tiny", 64, one, seconds, "plain", "ddp:nccl", "hvdlite"),
        steps("resnet50", 64, one, seconds, "plain", "ddp:nccl", "hvdlite"),
    ]


def describe(device: str) -> dict[str, Any]:
    """What the figures are of."""
    import torch

    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "device": "host memory",
        "gpus": 0,
    }
    if device == "cuda":
        found["device"] = torch.cuda.get_device_name(0)
        found["gpus"] = torch.cuda.device_count()
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def missing(job: Job) -> str:
    """Why a job is left out; empty: it is not."""
    if job.part == "c10d" and importlib.util.find_spec(C10D) is None:
        return f"{C10D} is absent"
    if "resnet50" in job.command and importlib.util.find_spec("torchvision") is None:
        return "torchvision is not installed"
    return ""


def run(job: Job, device: str, limit_s: float, log: Path) -> dict[str, Any]:
    """What the job prints, or why it did not."""
    found = {"part": job.part, "title": job.title, "ranks": job.world.ranks}
    reason = missing(job)
    if not reason and limit_s < 1:
        reason = "no time was left"
    if reason:
        return {**found, "skipped": reason}
    variables = starting.environment(device, job.world.variables)
    command = starting.on_ranks(job.world.ranks, job.command)
    code, elapsed_s = starting.run(command, variables, limit_s, log)
    lines = log.read_text(errors="replace").splitlines()
    results = [line for line in lines if line.startswith("{")]
    found["elapsed_s"] = round(elapsed_s, 1)
    if code or not results:
        return {**found, "failed": f"exit code {code}", "output": lines[-40:]}
    return {**found, "result": json.loads(results[-1])}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Benchmarks on GPUs.")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--only", action="append", help="jobs whose title has this text, as steps, gpt, staged"
    )
    parser.add_argument("--limit", type=float, default=190.0, help="seconds for everything")
    parser.add_argument("--output", type=Path, default=starting.BUILD / "bench.json")
    return parser.parse_args()


def main() -> int:
    asked = arguments()
    seconds = float(os.environ.get("BENCH_S", "6"))
    end = time.monotonic() + asked.limit
    lacking = preparing.what_is_missing(asked.device)
    if lacking:
        print(f"make bench-gpu does not run here: {lacking}", file=sys.stderr)
        return 1
    preparing.build()
    found = describe(asked.device)
    print(", ".join(f"{name} {value}" for name, value in found.items()), flush=True)
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    found["jobs"] = []
    for job in plan(asked.device, found["gpus"], seconds):
        if asked.only and not any(text in job.title for text in asked.only):
            continue
        # Several sizes or kinds of steps, each for its seconds.
        limit_s = min(START_S + 4 * seconds, end - time.monotonic())
        outcome = run(job, asked.device, limit_s, asked.output.with_suffix(".log"))
        found["jobs"].append({**outcome, "variables": asdict(job.world)["variables"]})
        # After each: what was measured stays, whatever comes.
        asked.output.write_text(json.dumps(found, indent=1) + "\n")
        print("\n".join(tables.lines(outcome)), flush=True)
    print(f"Written: {asked.output}")
    return int(not found["jobs"] or any("failed" in job for job in found["jobs"]))


if __name__ == "__main__":
    sys.exit(main())
