"""Each allocation of a program of operations fails once: every operation ends, and nothing crashes.

Whole engines of several hosts, in one process over a network in memory (out_of_memory.c)."""

from __future__ import annotations

import pytest

from tests.core.engine.test_many_hosts import program
from tests.harness.programs import run_program

_WRAPPED = ("malloc", "calloc", "realloc", "posix_memalign", "strdup")


@pytest.mark.parametrize("num_hosts", [2, pytest.param(3, marks=pytest.mark.wide)])
def test_an_allocation_that_fails_ends_every_operation_on_every_host(tmp_path, num_hosts):
    wrap = "-Wl," + ",".join(f"--wrap={name}" for name in _WRAPPED)
    path = program(tmp_path, "out_of_memory", wrap)
    finished = run_program([path, str(num_hosts), "1"], 300)
    assert finished.code == 0, finished
    assert finished.stdout == "many allocations, right\n"
