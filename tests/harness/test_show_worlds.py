"""`--show-worlds`."""

import subprocess
import sys

from tests.harness.show_worlds import Run, cell, table, tables
from tests.harness.wide import Variant
from tests.harness.worlds import MPIS, ROOT

LIMIT_S = 120


def test_a_cell_says_how_many_of_the_parameters_make_test_runs():
    assert cell([]) == "-"
    assert cell(["test", "test"]) == "all"
    assert cell(["test", "wide", "wide"]) == "1/3"
    assert cell(["wide"]) == "wide"
    assert cell(["long"]) == "long"


def test_a_test_is_shown_with_a_row_for_each_mpi_and_a_column_for_each_shape():
    runs = [
        Run("test_x", Variant(mpi, shape, other), "wide" if other == "b" else "test")
        for mpi, shape in (("openmpi", 3), ("mpich", 3), ("mpich", "2,1"))
        for other in "ab"
    ]
    assert table("test_x", runs) == [
        "test_x (2 parameters)",
        "           3    2,1",
        "  openmpi  1/2  -",
        "  mpich    1/2  1/2",
    ]


def test_a_test_of_processes_that_are_no_world_or_without_any_is_shown_too():
    assert tables([Run("test_y", Variant("mpich", None), "long"), Run("test_z", None, "test")]) == [
        *("test_y", "         own processes", "  mpich  long"),
        "test_z: no world, all",
    ]


def test_all_chosen_tests_are_shown_whatever_the_marks_and_none_is_run():
    options = ["--show-worlds", "-m", "not wide and not long", "-k", "dies_is_named"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", "tests/harness"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (first,) = [line for line in done.stdout.splitlines() if "::" in line]
    assert first == "tests/harness/test_worlds.py::test_a_rank_that_dies_is_named"
    assert all(
        any(line.startswith(f"  {mpi}") for line in done.stdout.splitlines()) for mpi in MPIS
    )
    assert "passed" not in done.stdout
