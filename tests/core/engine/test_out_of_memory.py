"""Each allocation of a program of operations fails once: every operation ends, and nothing crashes.

Whole engines of several ranks, in one process over a network in memory (out_of_memory.c)."""

from __future__ import annotations

import pytest

from tests.core.engine.test_many_hosts import program
from tests.harness.programs import run_program

_WRAPPED = ("malloc", "calloc", "realloc", "posix_memalign", "strdup", "clock_gettime")


@pytest.mark.parametrize(("num_hosts", "local_size"), [(2, 1), (1, 3)])
def test_an_allocation_that_fails_ends_every_operation_on_every_rank(
    tmp_path, num_hosts, local_size
):
    wrap = "-Wl," + ",".join(f"--wrap={name}" for name in _WRAPPED)
    path = program(tmp_path, "out_of_memory", wrap)
    finished = run_program([path, str(num_hosts), str(local_size)], 300)
    assert finished.code == 0, finished
    assert finished.stdout == "many allocations, right\n"
