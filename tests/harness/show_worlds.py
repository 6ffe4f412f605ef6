"""`--show-worlds` prints which tests `make test` runs in which worlds, and runs none of them.

One table for each test function, a row for each MPI, a column for each shape of the world:

    tests/core/matching/test_disagreement.py::test_a_disagreement_is_one_error (7 parameters)
               2    1,1  4
      openmpi  3/7  4/7  wide
      mpich    4/7  4/7  wide

4/7: `make test` runs 4 of the 7 parameters there; `make test-wide` runs the other 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.harness.wide import Shape, Variant

TARGETS = ("test", "wide", "long")
LEGEND = """\
all, 2/5: make test runs all of the test's parameters there, or so many of them; the rest is wide
wide: only make test-wide runs it; long: only make test-rig does
columns: ranks on one host (3), or on each of several pretended hosts (2,1)"""
NO_WORLD = "no world"


@dataclass(frozen=True)
class Run:
    """One run of a test."""

    test: str
    variant: Variant | None  # None: it needs no MPI
    target: str  # one of TARGETS


def tables(runs: Iterable[Run]) -> list[str]:
    """The lines of all tests, in the order of the runs."""
    by_test: dict[str, list[Run]] = {}
    for run in runs:
        by_test.setdefault(run.test, []).append(run)
    return [line for test, its_runs in by_test.items() for line in table(test, its_runs)]


def table(test: str, runs: Sequence[Run]) -> list[str]:
    """
    >>> runs = [Run("test_x", Variant("openmpi", "1,1", n), "test" if n else "wide") for n in "ab"]
    >>> table("test_x", [*runs, Run("test_x", Variant("mpich", 3, "a"), "wide")])
    ['test_x (2 parameters)', '           1,1   3', '  openmpi  all   -', '  mpich    -     wide']
    """
    placed = [(run, run.variant) for run in runs if run.variant]
    if not placed:
        return [f"{test}: {NO_WORLD}, {cell([run.target for run in runs])}"]
    shapes = list(dict.fromkeys(variant.shape for _, variant in placed))
    mpis = list(dict.fromkeys(variant.mpi for _, variant in placed))
    others = {variant.others for _, variant in placed}
    rows = [["", *map(name_of, shapes)]]
    for mpi in mpis:
        row = [mpi]
        for shape in shapes:
            here = [r.target for r, v in placed if (v.mpi, v.shape) == (mpi, shape)]
            row.append(cell(here))
        rows.append(row)
    count = f" ({len(others)} parameters)" if len(others) > 1 else ""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [test + count] + [
        "  "
        + "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def name_of(shape: Shape) -> str:
    """None: its processes are no world of the harness."""
    return "own processes" if shape is None else str(shape)


def cell(targets: Sequence[str]) -> str:
    """
    >>> cell([]), cell(["test"]), cell(["test", "wide"]), cell(["wide", "wide"]), cell(["long"])
    ('-', 'all', '1/2', 'wide', 'long')
    """
    counts = Counter(targets)
    if not targets:
        return "-"
    if counts["test"] == len(targets):
        return "all"
    if counts["test"]:
        return f"{counts['test']}/{len(targets)}"
    return "wide" if counts["wide"] else "long"
