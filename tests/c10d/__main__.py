"""Runs PyTorch's own tests of torch.distributed on hvdlite: `make test-c10d`.

    python -m tests.c10d [--name gloo] [--ranks 3] [--only test_barrier]

By default under both names of the backend, its own and Gloo's (HVDLITE_AS_GLOO=1: tests that ask
for Gloo run then, too), with 3 and with 4 ranks. `--name torch-gloo` runs Gloo itself, and
`--write-reference` stores what has passed as what must pass.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from tests.c10d.one_test import PASSED, SKIPPED, Outcome
from tests.c10d.session import Request
from tests.c10d.verdict import defects, read_exceptions
from tests.harness.worlds import orphaned_files, shared_files

HERE = Path(__file__).parent
REFERENCE, EXCEPTIONS = HERE / "reference.json", HERE / "exceptions.txt"
RANKS = (3, 4)
ITSELF = "torch-gloo"
# By what it is called here: the name that the tests see, and the variables of its ranks.
NAMES = {
    "hvdlite": ("hvdlite", {}),
    "gloo": ("gloo", {"HVDLITE_AS_GLOO": "1"}),
    ITSELF: ("gloo", {}),
}
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Run:
    """One session, ended."""

    name: str
    ranks: int
    outcomes: list[Outcome]
    seconds: float
    exit_code: int

    def count(self, status: str) -> int:
        return sum(outcome.status == status for outcome in self.outcomes)

    @property
    def passed(self) -> set[str]:
        return {outcome.test for outcome in self.outcomes if outcome.status == PASSED}


def run(name: str, request: Request) -> Run:
    begin = time.monotonic()
    _, variables = NAMES[name]
    environment = {k: v for k, v in os.environ.items() if k != "HVDLITE_AS_GLOO"}
    command = [sys.executable, "-m", "tests.c10d.session", json.dumps(asdict(request))]
    session = subprocess.Popen(
        command,
        env={**environment, **variables},
        cwd=HERE.parent.parent,
        stdin=subprocess.DEVNULL,
        # If this process is killed, the session still ends in good order.
        preexec_fn=lambda: _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
    )
    try:
        session.wait()
    finally:
        session.terminate()
        session.wait()
    lines = Path(request.output).read_text().splitlines()
    outcomes = [Outcome(**json.loads(line)) for line in lines]
    return Run(name, request.ranks, outcomes, time.monotonic() - begin, session.returncode)


def must_pass(reference: dict[str, Any], name: str, ranks: int) -> set[str]:
    """What Gloo passes must pass under its name."""
    listed = reference["passes"].get("torch-gloo" if name == "gloo" else name, {})
    return {test for test, where in listed.items() if ranks in where}


def defects_of(done: Run, reference: dict[str, Any], only: tuple[str, ...]) -> list[str]:
    expected = must_pass(reference, done.name, done.ranks)
    excepted = {
        e.test: e.reason
        for e in read_exceptions(EXCEPTIONS.read_text())
        if e.name == done.name and done.ranks in e.ranks
    }
    if only:
        expected &= set(only)
        excepted = {test: reason for test, reason in excepted.items() if test in only}
    found = defects(done.outcomes, expected, excepted)
    if done.exit_code:
        found.append(f"the session ended with exit code {done.exit_code}")
    return found


def learned(reference: dict[str, Any], runs: list[Run], torch: str) -> dict[str, Any]:
    """The reference with what these runs have shown, other numbers of ranks as they were."""
    needs_gpu = set(reference["needs_gpu"])
    passes = {name: dict(tests) for name, tests in reference["passes"].items()}
    for done in runs:
        if done.name == ITSELF:
            needs_gpu |= {o.test for o in done.outcomes if o.status == SKIPPED and "CUDA" in o.text}
        listed = passes.setdefault(done.name, {})
        for outcome in done.outcomes:
            where = {*listed.pop(outcome.test, []), done.ranks}
            where -= set() if outcome.status == PASSED else {done.ranks}
            if where:
                listed[outcome.test] = sorted(where)
    return {
        "torch": torch,
        "needs_gpu": sorted(needs_gpu),
        "passes": {name: dict(sorted(passes[name].items())) for name in sorted(passes)},
    }


def as_text(reference: dict[str, Any]) -> str:
    """JSON with a test in a line."""
    lines = json.dumps(reference, indent=1)
    for ranks in RANKS:
        lines = lines.replace(f"[\n    {ranks}\n   ]", f"[{ranks}]")
    return lines.replace("[\n    3,\n    4\n   ]", "[3, 4]") + "\n"


def show(runs: list[Run], found: dict[tuple[str, int], list[str]], reference: Any) -> None:
    table = Table(title="PyTorch's tests of torch.distributed")
    for column in ("name", "ranks", "passed", "failed", "skipped", "Gloo passes", "defects", "s"):
        table.add_column(column, justify="left" if column == "name" else "right")
    for done in runs:
        passed, skipped = done.count(PASSED), done.count(SKIPPED)
        cells = [
            done.ranks,
            passed,
            len(done.outcomes) - passed - skipped,
            skipped,
            len(must_pass(reference, ITSELF, done.ranks)),
            len(found[done.name, done.ranks]),
            f"{done.seconds:.0f}",
        ]
        table.add_row(done.name, *map(str, cells))
    Console(width=100).print(table)


@click.command(context_settings={"show_default": True})
@click.option(
    "--name", "names", multiple=True, type=click.Choice(list(NAMES)), help="[default: hvdlite gloo]"
)
@click.option("--ranks", multiple=True, type=click.Choice(list(map(str, RANKS))))
@click.option("--only", multiple=True, metavar="TEST", help="[default: all]")
@click.option("--jobs", default=4, help="Tests that run at the same time.")
@click.option("--limit-s", default=120.0, help="Seconds after which a test counts as hanging.")
@click.option("--write-reference", is_flag=True, help="What passes now must pass from now on.")
def main(
    names: tuple[str, ...],
    ranks: tuple[str, ...],
    only: tuple[str, ...],
    jobs: int,
    limit_s: float,
    write_reference: bool,
) -> None:
    """Runs PyTorch's own tests of torch.distributed on hvdlite."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    reference = json.loads(REFERENCE.read_text())
    torch = _torch_version()
    if torch != reference["torch"] and not write_reference:
        print(f"note: the reference is of torch {reference['torch']}, this is {torch}")
    before = shared_files()
    runs = []
    found: dict[tuple[str, int], list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="hvdlite-c10d-") as folder:
        for name in names or ("hvdlite", "gloo"):
            for size in map(int, ranks or RANKS):
                print(f"{name}, {size} ranks", flush=True)
                output = str(Path(folder, "outcomes"))
                needs_gpu = () if name == ITSELF else tuple(reference["needs_gpu"])
                request = Request(NAMES[name][0], size, output, jobs, limit_s, only, needs_gpu)
                done = run(name, request)
                runs.append(done)
                found[name, size] = [] if name == ITSELF else defects_of(done, reference, only)
                print(*found[name, size], sep="\n", end="\n" if found[name, size] else "")
    if write_reference:
        REFERENCE.write_text(as_text(learned(reference, runs, torch)))
    show(runs, found, reference)
    if left := orphaned_files(before):
        print(f"files left behind: {sorted(left)}")
    sys.exit(1 if left or (any(found.values()) and not write_reference) else 0)


def _torch_version() -> str:
    """Without importing it."""
    from importlib.metadata import version

    return version("torch").partition("+")[0]


if __name__ == "__main__":
    main(prog_name="python -m tests.c10d")
