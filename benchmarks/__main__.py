"""The command: measures, prints tables, writes JSON and a plot."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from benchmarks import host, report
from benchmarks.plan import FULL, QUICK, Plan

RESULTS = Path(__file__).parent / "results"


def measure(python: Path, ranks: int, plan: Plan, thread_level: str) -> dict[str, Any]:
    """Runs the worker on that many ranks of this host, under the MPI of that Python."""
    # Where ranks outnumber the cores hvdrun makes Open MPI yield: twelve times faster.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        request = {"plan": asdict(plan), "thread_level": thread_level, "output": str(output)}
        hvdrun = str(python.with_name("hvdrun"))
        command = [hvdrun, "-np", str(ranks), str(python), "-m", "benchmarks.worker"]
        finished = subprocess.run(
            [*command, json.dumps(request)], env=env, cwd=Path(__file__).parent.parent
        )
        if finished.returncode != 0:
            sys.exit(finished.returncode)  # hvdrun has said why
        result: dict[str, Any] = json.loads(output.read_text())
        return result


@click.command(context_settings={"show_default": True})
@click.option("--quick", is_flag=True, help="Few sizes and rounds, 2 ranks: a look, no figures.")
@click.option("--ranks", multiple=True, type=click.IntRange(min=2), help="[default: 2 and 4]")
@click.option(
    "--thread-level",
    "thread_levels",
    multiple=True,
    type=click.Choice(["serialized", "multiple"]),
    default=["multiple"],
    help="The thread level that MPI is initialized with; MPICH is often faster with serialized.",
)
@click.option(
    "--python",
    "pythons",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Measure with this Python's MPI: once more for each.  [default: the one that runs this]",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=RESULTS,
    show_default="benchmarks/results",
    help="The folder for bench.json and bench.png.",
)
def main(
    quick: bool,
    ranks: tuple[int, ...],
    thread_levels: tuple[str, ...],
    pythons: tuple[Path, ...],
    output: Path,
) -> None:
    """Compares hvdlite with torch.distributed's Gloo and the installed MPI, on this host."""
    described = host.describe()
    # Not resolved: a virtual environment's Python is a link to another one.
    interpreters = [Path(os.path.abspath(python)) for python in pythons] or [Path(sys.executable)]
    runs = [
        measure(python, count, QUICK if quick else FULL, level)
        for count in ranks or ((2,) if quick else (2, 4))
        for python in interpreters
        for level in thread_levels
    ]
    found = {"host": described, "runs": runs}
    console = Console()
    if not console.is_terminal:
        console.width = 110  # so that no column is folded in a file or a log
    report.print_tables(found, console)
    output.mkdir(parents=True, exist_ok=True)
    report.write_json(found, output / "bench.json")
    report.plot(runs, output / "bench.png")
    print(f"\nWritten: {output / 'bench.json'}, {output / 'bench.png'}")


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
