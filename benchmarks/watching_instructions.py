"""Counts the instructions that it costs a training step that hvdlite watches it.

    hvdrun -np 2 python -m benchmarks.watching_instructions [--task mlp] [--steps 5]

The clock can't tell half a percent of a step; callgrind counts it. The variants of
`benchmarks.watching` train one after the other, in one job. Only rank 0 is under callgrind, and is
some fifty times slower than rank 1, which therefore has always come to each operation before: rank
0 hardly waits, and what is counted is its work. It has no progress thread, whose looks would be as
many as it has time for: its operations go on when it waits for them. What a rank tells hvdrun every
few seconds is left out, as those are a step here. The parameters are
checked once in the `--steps` steps; of what this costs, the part is shown that 100 steps have of
one check. The second row repeats the first: it shows how far two counts of the same work are apart.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.instructions import by_object, lacking

CHECK = "HVDLITE_CHECK_PARAMETERS"
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
FOLDER = "HVDLITE_BENCH_CALLGRIND"  # where callgrind writes; it is set below callgrind only
CONTROL = "callgrind_control"


def become_counted() -> None:
    """Rank 0 is the same program under callgrind, which counts nothing yet; its parent waits."""
    rank = next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "1")
    if rank != "0" or FOLDER in os.environ:
        return
    if reason := lacking() or ("" if shutil.which(CONTROL) else f"{CONTROL} is missing"):
        sys.exit(reason)
    # Unless the threads take turns, a thread that polls keeps the others from their work.
    callgrind = ["valgrind", "--quiet", "--tool=callgrind", "--fair-sched=yes"]
    program = [sys.executable, "-m", "benchmarks.watching_instructions", *sys.argv[1:]]
    # The parent removes the folder: callgrind writes there once more when the program has ended.
    with tempfile.TemporaryDirectory(prefix="hvdlite-bench-") as folder:
        callgrind += ["--instr-atstart=no", f"--callgrind-out-file={folder}/counts"]
        environment = {**os.environ, FOLDER: folder}
        # MPICH's mpiexec has handed over a descriptor, by which the program finds it.
        done = subprocess.run([*callgrind, *program], env=environment, close_fds=False)
    sys.exit(done.returncode)


def without_progress_thread() -> None:
    """The engines of this process get none from now on."""
    from hvdlite import _core

    make = _core.Engine

    def make_without(**settings: Any) -> Any:
        return make(**{**settings, "progress_thread": False})

    vars(_core)["Engine"] = make_without


def control(*words: str) -> None:
    """Tells the callgrind of this process what to do, if it has one."""
    if FOLDER in os.environ:
        subprocess.run([CONTROL, *words, str(os.getpid())], check=True, capture_output=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="mlp")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    become_counted()
    os.environ["ATEN_CPU_CAPABILITY"] = "avx2"

    import torch
    from rich.console import Console
    from rich.table import Table

    import hvdlite as hvd
    from benchmarks.networks import TASKS
    from benchmarks.watching import DEFAULT, NOTHING_WATCHES, VARIANTS, training
    from hvdlite.observe import summary

    vars(summary).update(TELLS_EVERY_S=math.inf, TELLS_AT_LEAST_EVERY_S=math.inf)
    torch.set_num_threads(1)
    if FOLDER in os.environ:
        without_progress_thread()
    hvd.init()
    task = TASKS[args.task]
    for knobs in VARIANTS.values():
        once = {CHECK: str(args.steps)} if CHECK in knobs else {}
        # Steps that change nothing: valgrind has no AVX-512, and parameters that two kernels have
        # changed would differ by some bits, which the check is there to find.
        step = training(task, {**knobs, **once}, rate=0.0)
        hvd.barrier()
        control("--instr=on")
        for _ in range(args.steps):
            step()
        control("--instr=off")
        control("--dump")  # into a file of its own; the next variant begins at 0
    if FOLDER not in os.environ:
        return
    title = f"{task.title}: instructions of a step of rank 0 of 2"
    table = Table("", "a step", "of it the core", "costs", title=title)
    folder = Path(os.environ[FOLDER])
    by_variant = {
        variant: by_object((folder / f"counts.{number}").read_text().splitlines(), "_core.abi3.so")
        for number, variant in enumerate(VARIANTS, start=1)
    }
    usual, default = (by_variant[name]["all"] for name in (NOTHING_WATCHES, DEFAULT))
    for variant, knobs in VARIANTS.items():
        found = by_variant[variant]
        more = found["all"] - usual
        if CHECK in knobs:
            more = default - usual + (found["all"] - default) * args.steps / int(knobs[CHECK])
        figures = (f"{found[what] / args.steps:,.0f}" for what in ("all", "core"))
        table.add_row(variant, *figures, f"{more / usual:+.3%}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
