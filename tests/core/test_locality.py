"""Where staging blocks are written: into the caches, or past them where these are far apart."""

from __future__ import annotations

import ctypes
import subprocess
import sysconfig

import pytest
import torch

import hvdlite as hvd
from hvdlite import _core
from tests.core import limits, oracles
from tests.worlds import ROOT

WINDOW, IN_FLIGHT = 8, 4
NEAR, FAR, MEMORY = 0.05, 0.4, 0.1  # ns per byte


class Locality:
    """The core's state machine, fed with blocks of 1000 bytes."""

    def __init__(self, folder):
        core = ROOT / "hvdlite" / "_core"
        compiler = (sysconfig.get_config_var("CC") or "cc").split()
        shared = folder / "locality.so"
        command = [*compiler, "-std=c11", "-shared", "-fPIC", "-o", shared, core / "locality.c"]
        subprocess.run(command, check=True)
        self._note = ctypes.CDLL(str(shared)).hvdl_locality_note
        self._note.restype = ctypes.c_bool
        self._note.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint64]
        self._state = ctypes.create_string_buffer(4096)
        self.past_cache = False
        self.changes = []

    def feed(self, cached, past, blocks):
        """Blocks that take so long, by how they were written; returns how many were written past
        the caches."""
        count = 0
        for _ in range(blocks):
            count += self.past_cache
            ns = round(1000 * (past if self.past_cache else cached))
            if self._note(self._state, 1000, ns, IN_FLIGHT):
                self.past_cache = not self.past_cache
        return count


@pytest.fixture
def locality(tmp_path):
    return Locality(tmp_path)


def test_a_shared_cache_is_used_for_ever(locality):
    assert locality.feed(NEAR, MEMORY, 100_000) == 0


def test_a_block_that_took_long_now_and_then_changes_nothing(locality):
    for _ in range(1000):
        assert locality.feed(NEAR, MEMORY, 5) == 0
        assert locality.feed(100 * FAR, MEMORY, 3) == 0


def test_caches_that_are_far_are_passed_but_for_a_look_now_and_then(locality):
    assert locality.feed(FAR, MEMORY, WINDOW) == 0
    assert locality.past_cache
    assert locality.feed(FAR, MEMORY, 100_000) > 98_000


def test_it_notices_that_they_are_near_again(locality):
    locality.feed(FAR, MEMORY, 10_000)
    assert locality.past_cache
    locality.feed(NEAR, MEMORY, 40_000)
    assert not locality.past_cache
    assert locality.feed(NEAR, MEMORY, 10_000) == 0


def test_where_memory_is_no_faster_it_is_tried_rarely(locality):
    assert 0 < locality.feed(FAR, FAR, 100_000) < 2_000


def reduce_forced(dtype, op, past_cache_on):
    """Past the caches on some of the ranks, all or none: the result is the closed form's."""
    hvd.init()
    _core.force_past_cache(hvd.rank() in past_cache_on)
    try:
        wrong = []
        for count in (*limits.counts("default knobs", dtype, hvd.size()), 1_000_003):
            given, expected = oracles.case_of(dtype, op, hvd.rank(), hvd.size(), count)
            result = hvd.allreduce(given, op=getattr(hvd, op), name=f"{op} {count}")
            if problem := oracles.mismatch(result, expected, exact=op != "Average"):
                wrong.append(f"{count} elements: {problem}")
        rows = torch.arange(100_000.0) + hvd.rank()
        gathered = hvd.allgather(rows)
        if (
            not gathered.view(hvd.size(), -1)
            .sub(rows - hvd.rank())
            .T.equal(torch.arange(hvd.size()).expand(100_000, -1))
        ):
            wrong.append("allgather")
        assert not wrong, "\n".join(wrong)
    finally:
        _core.force_past_cache(None)


@pytest.mark.ranks(2, 3)
@pytest.mark.hosts("2,1")
@pytest.mark.parametrize(
    ("dtype", "op"), [("float32", "Sum"), ("bfloat16", "Average"), ("uint8", "Max")]
)
@pytest.mark.parametrize("past_cache_on", [(0,), (0, 1, 2)], ids=["one rank", "all ranks"])
def test_the_results_are_the_same_past_the_caches(world, dtype, op, past_cache_on):
    world.run(reduce_forced, dtype, op, past_cache_on)
