"""Runs the programs of this folder with an interpreter that has a CUDA build of torch.

`make test-gpu PYTHON=/path/to/python`. Installs nothing: the core is compiled into build/gpu, with
that interpreter, and found there by PYTHONPATH; outside a source tree, hvdlite is taken as it is
installed. What it needs of the interpreter: torch with CUDA, what hvdlite imports, setuptools, and
mpi4py with an MPI.

Each program runs on one rank by NCCL, on two ranks that stage on one GPU, and on several by NCCL:
on a GPU each, or on the same one. Programs that do not disturb each other run at the same time.
Where something is missing, one line says what, and the exit code is 1: who calls this wants it run.

    run.py [--device cpu] [--only check_forms] [--limit 200] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent.parent
sys.path.insert(0, str(ROOT))

from tests.gpu.with_gpu import preparing, starting  # noqa: E402, as the root is not on the path before
from tests.gpu.with_gpu.starting import World  # noqa: E402

# The longest that a program may take.
LIMIT_S = 120.0
# It starts ranks itself.
ALONE = "check_faults"
# Started first, so that nothing waits for them at the end.
LONG = (ALONE, "check_optimizer")
# NCCL kernels of processes that share a GPU take turns on it: more programs would only wait.
AT_ONCE_ON_ONE_GPU = 3


@dataclass(frozen=True)
class Job:
    """A program in a world."""

    program: Path
    world: World

    @property
    def starts_ranks(self) -> bool:
        return self.program.stem == ALONE

    @property
    def ranks(self) -> int:
        return 2 if self.starts_ranks else self.world.ranks


@dataclass(frozen=True)
class Outcome:
    job: Job
    code: int
    elapsed_s: float
    lines: Sequence[str]

    def count(self, word: str) -> int:
        return sum(line.startswith(f"{word} ") for line in self.lines)

    @property
    def is_right(self) -> bool:
        return self.code == 0 and self.count("PASS") + self.count("SKIP") > 0


def main() -> int:
    """Runs everything; 0 if all of it passed."""
    asked = arguments()
    lacking = preparing.what_is_missing(asked.device)
    if lacking:
        print(f"make test-gpu does not run here: {lacking}", file=sys.stderr)
        return 1
    gpus = describe(asked.device)
    preparing.build()
    asked.output.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + asked.limit
    outcomes: list[Outcome] = []
    for together, jobs in stages(asked.device, gpus, asked.only):
        with concurrent.futures.ThreadPoolExecutor(together) as pool:
            for outcome in pool.map(lambda job: run(job, asked.device, end, asked.output), jobs):
                outcomes.append(outcome)
                report(outcome)
    print_table(outcomes)
    return int(not outcomes or not all(outcome.is_right for outcome in outcomes))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The checks that need a GPU.")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", action="append", help="a program, such as check_forms")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds for everything")
    parser.add_argument(
        "--output", type=Path, default=starting.BUILD / "output", help="for the logs"
    )
    return parser.parse_args()


def describe(device: str) -> int:
    """Prints what it runs on; returns the number of GPUs."""
    import torch

    if device == "cpu":
        print(f"torch {torch.__version__}, in host memory", flush=True)
        return 0
    count = torch.cuda.device_count()
    nccl = ".".join(str(part) for part in torch.cuda.nccl.version())
    name = torch.cuda.get_device_name(0)
    print(f"torch {torch.__version__}, NCCL {nccl}, {count} x {name}", flush=True)
    return count


def stages(device: str, gpus: int, only: Sequence[str] | None) -> list[tuple[int, list[Job]]]:
    """One after the other: jobs, and how many of them run at the same time."""
    programs = sorted(HERE.glob("check_*.py"), key=lambda path: (path.stem not in LONG, path.stem))
    if only:
        programs = [program for program in programs if program.stem in only]
    cores = os.cpu_count() or 1
    *others, last = starting.worlds(device, gpus)
    first = [Job(program, world) for world in others for program in programs]
    first = [job for job in first if not job.starts_ranks]
    then = [Job(program, last) for program in programs]
    return [
        (max(1, cores // 2), first),
        (min(max(1, cores // (2 * last.ranks)), AT_ONCE_ON_ONE_GPU), then),
    ]


def run(job: Job, device: str, end: float, output: Path) -> Outcome:
    """Runs it in the time that is left."""
    limit_s = min(LIMIT_S, end - time.monotonic())
    if limit_s < 1:
        return Outcome(job, starting.TIMED_OUT, 0.0, ["no time was left to start it"])
    ranks = 1 if job.starts_ranks else job.world.ranks
    title = job.world.name.replace(" ", "-").replace(",", "")
    log = output / f"{job.program.stem}-{title}.log"
    # What starts ranks itself has to end them before it is ended.
    own_limit = {"CHECK_LIMIT_S": str(limit_s - 2 * starting.LAST_WORDS_S)}
    variables = starting.environment(device, {**job.world.variables, **own_limit})
    command = starting.on_ranks(ranks, [str(job.program)])
    code, elapsed_s = starting.run(command, variables, limit_s, log)
    return Outcome(job, code, elapsed_s, log.read_text(errors="replace").splitlines())


def report(outcome: Outcome) -> None:
    """One line; of a program that failed, everything that it printed."""
    word = "passed" if outcome.is_right else f"FAILED (exit code {outcome.code})"
    job = outcome.job
    print(f"{word}: {job.program.stem}, {job.world.name}, {outcome.elapsed_s:.0f} s", flush=True)
    if not outcome.is_right:
        print("\n".join(f"    {line}" for line in outcome.lines), flush=True)


def print_table(outcomes: Sequence[Outcome]) -> None:
    rows: list[tuple[str, ...]] = [
        ("program", "world", "passed", "failed", "skipped", "exit code", "s")
    ]
    for one in outcomes:
        counts = (str(one.count(word)) for word in ("PASS", "FAIL", "SKIP"))
        where = (one.job.program.stem, one.job.world.name)
        rows.append((*where, *counts, str(one.code), f"{one.elapsed_s:.0f}"))
    totals = (sum(one.count(word) for one in outcomes) for word in ("PASS", "FAIL", "SKIP"))
    bad = sum(not one.is_right for one in outcomes)
    rows.append(("all", f"{len(outcomes)} runs, {bad} failed", *map(str, totals), "", ""))
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


if __name__ == "__main__":
    sys.exit(main())
