"""Makes faults in training jobs and looks whether hvdrun names the culprit: `make fault-table`.

    python -m tests.faults [--only 'SIGSTOP of a rank'] [--mpi mpich] [--hosts 3] [--show]

It exits with 1 if fewer are named than there must be, or if anybody is blamed wrongly. The hosts
are those of tests/cluster, which need root, sshd and ip.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from benchmarks.rig import lacking as what_a_rig_lacks
from benchmarks.rig import shared_with_hosts
from tests.faults.differences import DIFFERENCES
from tests.faults.ends import ENDS
from tests.faults.fault import Fault
from tests.faults.one_run import Outcome, run
from tests.faults.surroundings import SURROUNDINGS
from tests.faults.waits import WAITS
from tests.harness.worlds import MPIS, ROOT, python_of
from tests.rig.conftest import Rig

FAULTS = [*WAITS, *ENDS, *DIFFERENCES, *SURROUNDINGS]
HOSTS = ("1", "3")
# The part of all runs that must name the culprit.
NAMED = 38 / 40


@contextmanager
def hosts(folder: Path) -> Iterator[Rig]:
    share = folder / "share"
    share.mkdir()
    os.environ["XDG_CACHE_HOME"] = str(share / "cache")  # hvdrun's cache knows no other hosts
    rig = Rig(folder / "cluster", share)
    try:
        rig.up(*shared_with_hosts(share, ROOT, python_of("mpich").parents[1]))
        yield rig
    finally:
        rig("down")


def row(outcome: Outcome) -> tuple[str, ...]:
    seconds = "" if outcome.named_s is None else f"{outcome.named_s:.1f}"
    named = "no" if outcome.named_s is None else "yes"
    layout = "1 host" if outcome.hosts == 1 else f"{outcome.hosts} hosts"
    return outcome.fault, layout, outcome.mpi, named, seconds, ", ".join(outcome.wrong)


def show(console: Console, outcomes: list[Outcome]) -> None:
    titles = ("fault", "layout", "MPI", "named", "s after the limit", "wrong names")
    table = Table(*titles)
    for outcome in outcomes:
        table.add_row(*row(outcome), style="" if outcome.is_right else "bold")
    console.print(table)


@click.command()
@click.option("--only", multiple=True, help="Run only this fault (again: these).")
@click.option("--mpi", multiple=True, type=click.Choice(MPIS), help="Run only under this MPI.")
@click.option("--hosts", "layouts", multiple=True, type=click.Choice(HOSTS))
@click.option("--show", "shows", is_flag=True, help="Print what each job has written.")
@click.option("--list", "lists", is_flag=True, help="Print the names of the faults; run none.")
def main(
    only: tuple[str, ...], mpi: tuple[str, ...], layouts: tuple[str, ...], shows: bool, lists: bool
) -> None:
    if unknown := set(only) - {fault.name for fault in FAULTS}:
        raise click.UsageError(f"no fault {sorted(unknown)[0]!r}: --list shows them")
    chosen = [fault for fault in FAULTS if not only or fault.name in only]
    if lists:
        for fault in chosen:
            click.echo(fault.name)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the hosts go down
    console = Console(width=None if sys.stdout.isatty() else 120)
    outcomes: list[Outcome] = []
    for layout in layouts or HOSTS:
        outcomes += _in_layout(chosen, int(layout), mpi or MPIS, shows)
    show(console, outcomes)
    named = sum(outcome.named_s is not None for outcome in outcomes)
    wrong = sum(bool(outcome.wrong) for outcome in outcomes)
    click.echo(f"{named} of {len(outcomes)} named, {wrong} with a wrong name")
    if named < NAMED * len(outcomes) or wrong:
        raise SystemExit(1)


def _in_layout(
    chosen: list[Fault], layout: int, mpis: tuple[str, ...], shows: bool
) -> list[Outcome]:
    chosen = [fault for fault in chosen if layout in fault.hosts]
    outcomes: list[Outcome] = []
    if layout > 1 and chosen and (reason := what_a_rig_lacks()):
        raise click.ClickException(reason)
    with tempfile.TemporaryDirectory(prefix="hvdlite-faults-") as name:
        folder = Path(name)
        if layout == 1:
            outcomes += _runs(chosen, mpis, shows, folder, None)
        elif chosen:
            with hosts(folder) as rig:
                outcomes += _runs(chosen, mpis, shows, rig.share, rig)
    return outcomes


def _runs(
    chosen: list[Fault], mpis: tuple[str, ...], shows: bool, folder: Path, rig: Rig | None
) -> Iterator[Outcome]:
    for fault in chosen:
        if reason := fault.lacking():
            click.echo(f"left out: {fault.name}: {reason}")
            continue
        for mpi in mpis:
            outcome = run(fault, mpi, folder, rig)
            click.echo("  ".join(row(outcome)))
            if shows or not outcome.is_right:
                for pattern in outcome.missing:
                    click.echo(f"    not said: {pattern}")
                click.echo(outcome.text)
            yield outcome


if __name__ == "__main__":
    main()
