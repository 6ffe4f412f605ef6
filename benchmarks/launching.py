"""Measures a job from start to exit: hvdrun beside the mpirun of the same environment.

    python -m benchmarks.launching [--rounds 15] [--ranks 2]

Both start the same program; they take turns. The figures are medians over the rounds.
"""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import click

PROGRAMS = {
    "true": ["true"],
    "mpi4py": [sys.executable, "-c", "from mpi4py import MPI; MPI.COMM_WORLD.Barrier()"],
}
LIMIT_S = 60.0


def launchers(ranks: int) -> dict[str, list[str]]:
    """Their command lines, without the program."""
    mpirun = str(Path(sys.executable).with_name("mpirun"))
    said = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=True).stdout
    as_root = ["--allow-run-as-root"] if "Open MPI" in said and os.geteuid() == 0 else []
    return {
        "hvdrun": [sys.executable, "-m", "hvdrun", "-np", str(ranks)],
        "mpirun": [mpirun, *as_root, "-np", str(ranks)],
    }


def time_job(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=LIMIT_S
    )
    return time.perf_counter() - begin


@click.command(context_settings={"show_default": True})
@click.option("--rounds", default=15)
@click.option("--ranks", default=2)
def main(rounds: int, ranks: int) -> None:
    """Times starts of hvdrun and of bare mpirun."""
    both = launchers(ranks)
    for name, program in PROGRAMS.items():
        times_s: dict[str, list[float]] = {launcher: [] for launcher in both}
        for _ in range(rounds):
            for launcher, times in times_s.items():
                times.append(time_job([*both[launcher], *program]))
        medians_ms = {who: 1e3 * statistics.median(times) for who, times in times_s.items()}
        more_ms = medians_ms["hvdrun"] - medians_ms["mpirun"]
        figures = "  ".join(f"{who} {ms:.0f} ms" for who, ms in medians_ms.items())
        print(f"{name:8} {figures}  hvdrun's more: {more_ms:+.0f} ms")


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.launching")
