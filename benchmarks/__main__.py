"""The command: measures, prints tables, writes JSON and plots, and the page that shows them."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from benchmarks import host, instructions, merging, plots, report, rig, starting, tables, targets
from benchmarks.plan import PLANS, Flavour, jobs

RESULTS = Path(__file__).parent / "results"
CORE = Path(__file__).parent.parent / "hvdlite" / "_core.abi3.so"
WHAT = (
    "allreduce",
    "reducescatter",
    "types",
    "tail",
    "training",
    "c10d",
    "wrapped",
    "sharded",
    "weighted",
    "upkeep",
    "memory",
    "copies",
    "asynchronous",
    "servers",
    "instructions",
    "rig",
)


def lacking(wanted: set[str]) -> dict[str, str]:
    """What of the wanted can't be measured here, and why."""
    reasons = {
        **dict.fromkeys(("rig", "reducescatter", "servers"), rig.lacking()),
        "instructions": instructions.lacking(),
    }
    return {what: reason for what, reason in reasons.items() if what in wanted and reason}


def measure(plan_name: str, flavours: list[Flavour], wanted: set[str]) -> dict[str, Any]:
    """The report; it names what can't be measured here."""
    plan = PLANS[plan_name]
    reasons = lacking(wanted)
    not_measured = list(dict.fromkeys(reasons.values()))
    for reason in not_measured:
        print(reason, file=sys.stderr)
    wanted = wanted - reasons.keys()
    begin = time.monotonic()
    failed: list[str] = []
    found: dict[str, Any] = {"host": host.describe(), "not_measured": not_measured}
    started = jobs(plan, flavours, wanted, found["host"]["cores"])
    found["runs"] = starting.run_jobs(plan, started, failed)
    if "instructions" in wanted:
        with starting.noting(failed, "instructions"):
            found["instructions"] = instructions.count(CORE, plan.instruction_counts)
    if "memory" in wanted:
        with starting.noting(failed, "memory"):
            found["memory"] = starting.run_memory(flavours[0].python)
    if "copies" in wanted:
        with starting.noting(failed, "copies"):
            found["copies"] = starting.run_copies(flavours[0].python, plan)
    if "asynchronous" in wanted:
        with starting.noting(failed, "asynchronous"):
            found["asynchronous"] = starting.run_asynchronous(flavours[0].python, plan)
    if "servers" in wanted:
        with starting.noting(failed, "servers"):
            found["servers"] = starting.run_servers(flavours[0].python, plan)
    found["failed"] = failed
    versions = {run["mpi"].split(",")[0]: run["mpi_version"] for run in found["runs"]}
    found["host"].update(versions)
    found["host"]["minutes"] = round((time.monotonic() - begin) / 60, 1)
    return found


@click.command(context_settings={"show_default": True})
@click.option(
    "--plan",
    type=click.Choice(list(PLANS)),
    default="full",
    help="full: some thirty minutes; quick: two, a look; tiny: everything once, no figures.",
)
@click.option("--only", "only", multiple=True, type=click.Choice(WHAT), help="[default: all]")
@click.option(
    "--mpich",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The Python of an environment with MPICH: measured too, at both of its thread levels.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=RESULTS,
    show_default="benchmarks/results",
    help="The folder for bench.json and the plots.",
)
@click.option(
    "--merge",
    is_flag=True,
    help="Keep what bench.json has of parts that this run does not measure.",
)
@click.option(
    "--page",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A page of Markdown in which the figures between two marks are replaced.",
)
def main(
    plan: str,
    only: tuple[str, ...],
    mpich: Path | None,
    output: Path,
    merge: bool,
    page: Path | None,
) -> None:
    """Compares hvdlite with torch.distributed's Gloo and the MPI of this Python, on this host and
    on several ones that it makes up (tests/cluster)."""
    flavours = [Flavour(sys.executable, "multiple")]
    if mpich is not None:
        # Not resolved: a virtual environment's Python is a link to another one.
        flavours += [Flavour(os.path.abspath(mpich), level) for level in ("multiple", "serialized")]
    found = measure(plan, flavours, set(only or WHAT))
    verdicts = targets.verdicts(found)
    if only:
        verdicts = [verdict for verdict in verdicts if verdict.met is not None]

    console = Console()
    if not console.is_terminal:
        console.width = 140  # so that no column is folded in a file or a log
    report.print_report(found, tables.tables(found, verdicts), console)
    written = output / "bench.json"
    if merge and written.exists():
        found = merging.merged(found, json.loads(written.read_text()))
        verdicts = targets.verdicts(found)
    found["targets"] = targets.as_rows(verdicts)
    output.mkdir(parents=True, exist_ok=True)
    written.write_text(json.dumps(found, indent=1) + "\n")
    figures = plots.draw(found, output)
    print(f"\nWritten: {', '.join(str(path) for path in (written, *figures))}")
    if page is not None:
        links = [os.path.relpath(figure, page.parent) for figure in figures]
        text = report.markdown(found, tables.tables(found, verdicts), links)
        page.write_text(report.replace_measured(page.read_text(), text))
        print(f"Written: {page}")
    if found["failed"]:
        sys.exit(1)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
