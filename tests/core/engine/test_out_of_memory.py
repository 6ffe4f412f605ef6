"""Each allocation of a program of operations fails once: every operation ends, and nothing crashes.

Whole engines of several ranks, in one process over a network in memory (out_of_memory.c)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.compiled import with_core
from tests.harness.programs import run_program

_WRAPPED = ("malloc", "calloc", "realloc", "posix_memalign", "strdup", "clock_gettime")


@pytest.mark.parametrize(("num_hosts", "local_size"), [(2, 1), (1, 3)])
def test_an_allocation_that_fails_ends_every_operation_on_every_rank(
    tmp_path, num_hosts, local_size
):
    wrap = "-Wl," + ",".join(f"--wrap={name}" for name in _WRAPPED)
    path = with_core(tmp_path / "program", Path(__file__).with_name("out_of_memory.c"), wrap)
    finished = run_program([path, str(num_hosts), str(local_size)], 300)
    assert finished.code == 0, finished
    assert finished.stdout == "many allocations, right\n"
