"""In a program of operations one thing fails, the first of its kind, then the second, and so on:
every operation ends on every rank, those that succeed have the right result, and nothing crashes.

Whole engines of several ranks, in one process over a network in memory (faults.c). `make test`
plays some of the cases; `make faults` plays all (HVDLITE_TEST_FAULTS=all), with sanitizers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.harness.compiled import with_core
from tests.harness.programs import run_program

_WRAPPED = ("malloc", "calloc", "realloc", "posix_memalign", "strdup", "clock_gettime", "nanosleep")
_ALL = os.environ.get("HVDLITE_TEST_FAULTS") == "all"

# What fails, hosts, ranks of each, the distance of the cases in `make test`, and how many cases
# there are at least: a fifth less than were counted, as some calls depend on the time, and each
# change of the core adds or saves a few.
_SWEEPS = (
    ("allocation", 2, 1, 7, 340),
    ("allocation", 1, 3, 7, 360),
    ("allocation", 2, 2, 97, 1000),
    ("call", 2, 1, 13, 1100),
    ("call", 3, 1, 41, 1900),
    ("call", 2, 2, 29, 1700),
    ("calls", 2, 1, 43, 1100),
    ("calls", 3, 1, 101, 1900),
    ("calls", 2, 2, 101, 1700),
    ("message", 2, 1, 9, 150),
    ("message", 2, 2, 29, 180),
)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    wrap = "-Wl," + ",".join(f"--wrap={name}" for name in _WRAPPED)
    path = tmp_path_factory.mktemp("faults") / "faults"
    return with_core(path, Path(__file__).with_name("faults.c"), wrap)


@pytest.mark.parametrize(("what", "num_hosts", "local_size", "step", "least"), _SWEEPS)
def test_whatever_fails_every_operation_ends_on_every_rank(
    program, monkeypatch, what, num_hosts, local_size, step, least
):
    # What MPI may still write to is kept until the process ends.
    monkeypatch.setenv("ASAN_OPTIONS", "detect_leaks=0")
    monkeypatch.setenv("UBSAN_OPTIONS", "print_stacktrace=1")
    step = 1 if _ALL else step
    finished = run_program([program, what, str(num_hosts), str(local_size), str(step)], 1200)
    assert finished.code == 0, finished
    print(f"{num_hosts} x {local_size}: {finished.stdout}", end="")
    assert int(finished.find(r"^(\d+) cases of .*: right$")) >= least // step
    assert int(finished.find(r"failures in (\d+): right$")) > 0
