"""Where staging blocks are written: into the caches, or past them where these are far apart."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import pytest
import torch

import hvdlite as hvd
from hvdlite import _core
from hvdlite.world import world as worlds
from tests.core import limits, oracles
from tests.harness.compiled import compiled, linked, sources

WINDOW, IN_FLIGHT = 8, 4
SUMS, COPIES = 0, 1  # hvdl_timed_work
ALLREDUCE, SCATTER, SHARE, PARTS = range(4)  # hvdl_pass_type
BLOCK_BYTES = 128 << 10
HAS_STORES = platform.machine() == "x86_64"  # that go past the caches
NEAR, FAR, MEMORY = 0.05, 0.4, 0.1  # ns per byte


class Locality:
    """The core's state machine, fed with blocks of 1000 bytes."""

    def __init__(self, folder):
        objects = map(compiled, sources("host/locality"))
        shared = linked(folder / "locality.so", objects, "-shared")
        library = ctypes.CDLL(str(shared))
        self._untimed = library.hvdl_locality_untimed
        self._untimed.restype = ctypes.c_bool
        self._note = library.hvdl_locality_note
        self._note.restype = ctypes.c_bool
        numbers = [ctypes.c_size_t, ctypes.c_uint64, ctypes.c_uint64]
        self._note.argtypes = [ctypes.c_void_p, ctypes.c_int, *numbers]
        self._state = ctypes.create_string_buffer(4096)
        self.past_cache = False

    def feed(self, cached, past, blocks, work=SUMS):
        """Blocks that take so long, by how they were written; returns how many were written past
        the caches."""
        count = 0
        for _ in range(blocks):
            count += self.past_cache
            ns = round(1000 * (past if self.past_cache else cached))
            if self._note(self._state, work, 1000, ns, IN_FLIGHT):
                self.past_cache = not self.past_cache
        return count

    def untimed(self, blocks):
        """Returns how often the answer has changed."""
        changes = sum(self._untimed(self._state) for _ in range(blocks))
        self.past_cache ^= changes % 2 == 1
        return changes


@pytest.fixture
def locality(tmp_path):
    return Locality(tmp_path)


def test_a_shared_cache_is_used_for_ever(locality):
    assert locality.feed(NEAR, MEMORY, 100_000) == 0


def test_a_block_that_took_long_now_and_then_changes_nothing(locality):
    for _ in range(1000):
        assert locality.feed(NEAR, MEMORY, 3) == 0
        assert locality.feed(100 * FAR, MEMORY, 5) == 0


def test_an_error_costs_few_blocks(locality):
    locality.feed(FAR, MEMORY, WINDOW)
    assert locality.feed(NEAR, MEMORY, 10_000) < 100


def test_caches_that_are_far_are_passed_but_for_a_look_now_and_then(locality):
    assert locality.feed(FAR, MEMORY, WINDOW) == 0
    assert locality.past_cache
    assert locality.feed(FAR, MEMORY, 100_000) > 98_000


def test_it_notices_that_they_are_near_again(locality):
    locality.feed(FAR, MEMORY, 10_000)
    assert locality.past_cache
    locality.feed(NEAR, MEMORY, 4_200)
    assert not locality.past_cache
    assert locality.feed(NEAR, MEMORY, 10_000) == 0


def test_where_memory_is_no_faster_it_is_tried_rarely(locality):
    assert 0 < locality.feed(FAR, FAR, 100_000) < 2_000


def test_copies_are_not_compared_with_sums(locality):
    """Sums take long near and far, and copies do not: a trial of sums is judged by sums alone."""
    past = locality.feed(FAR, FAR, WINDOW)
    assert locality.past_cache
    for _ in range(100):
        past += locality.feed(NEAR, NEAR / 2, 1, COPIES)
        past += locality.feed(FAR, FAR, 1)
    assert not locality.past_cache
    assert 0 < past < 50


def test_fast_sums_do_not_make_copies_try_more_often(locality):
    past = 0
    for _ in range(5_000):
        past += locality.feed(NEAR, NEAR, WINDOW)
        past += locality.feed(FAR, FAR, WINDOW, COPIES)
    assert 0 < past < 2_000


@pytest.mark.parametrize("work", [SUMS, COPIES])
def test_one_work_finds_out_for_both(locality, work):
    assert locality.feed(NEAR, MEMORY, 10 * WINDOW, 1 - work) == 0
    locality.feed(FAR, MEMORY, 2 * WINDOW + IN_FLIGHT, work)
    assert locality.past_cache
    assert locality.feed(FAR, MEMORY, 5 * WINDOW, 1 - work) == 5 * WINDOW
    locality.feed(NEAR, MEMORY, 10_000, 1 - work)
    assert not locality.past_cache


def test_a_trial_whose_work_does_not_come_again_is_given_up(locality):
    locality.feed(FAR, MEMORY, WINDOW)
    assert locality.past_cache
    locality.feed(NEAR, MEMORY, 1100, COPIES)
    assert not locality.past_cache


def test_what_nothing_can_correct_is_given_up(locality):
    locality.feed(FAR, MEMORY, 100)
    assert locality.past_cache
    assert locality.untimed(1000) == 0
    locality.feed(FAR, MEMORY, 1)
    assert locality.untimed(1000) == 0
    assert locality.untimed(100) == 1
    assert not locality.past_cache


def pipelines(folder: Path) -> ctypes.CDLL:
    own = Path(__file__).with_name("pipelines.c")
    parts = ("host/*", "base/schedule", "base/extents", "base/sum_tree")
    clocked = [
        compiled(source, "-D_GNU_SOURCE", "-Dclock_gettime=test_clock_gettime")
        for source in [own, *sources(*parts)]
    ]
    objects = [*clocked, *map(compiled, sources("kernels/*"))]
    return ctypes.CDLL(str(linked(folder / "pipelines.so", objects, "-shared")))


@pytest.fixture(scope="module")
def past_bytes(tmp_path_factory):
    """Runs pipelines under a clock, where a stage of a block takes `ns`; returns what each rank
    has written past the caches."""
    library = pipelines(tmp_path_factory.getbasetemp())

    def run(ranks, ns, ns_past, blocks=32, kind=ALLREDUCE, dtype=_core.FLOAT32, outlier_at=0):
        counts = (ctypes.c_uint64 * ranks)()
        size = ctypes.c_size_t
        elements = blocks * BLOCK_BYTES // (2 if dtype == _core.BFLOAT16 else 4)
        assert not library.run(
            *(ranks, kind, dtype, size(elements), 1, size(BLOCK_BYTES)),
            *(ctypes.c_uint64(number) for number in (ns, ns_past, outlier_at, 3_000_000)),
            counts,
        )
        return list(counts)

    return run


@pytest.mark.parametrize(
    "kind",
    [ALLREDUCE, SCATTER, SHARE, PARTS],
    ids=["one host", "several", "allgather", "alltoall"],
)
@pytest.mark.parametrize("dtype", [_core.FLOAT32, _core.BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [2, 4, 17])
def test_all_ranks_follow_what_the_first_one_finds_out(past_bytes, ranks, kind, dtype):
    slow, fast = ranks * 10 * BLOCK_BYTES, BLOCK_BYTES // 100
    blocks = ranks * 32 if kind >= SHARE else 32
    found = past_bytes(ranks, slow, fast, blocks=blocks, kind=kind, dtype=dtype)
    assert [count > 0 for count in found] == [HAS_STORES] * ranks


@pytest.mark.parametrize("kind", [ALLREDUCE, SHARE, PARTS])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_lose_their_core_once_change_nothing(past_bytes, ranks, kind):
    for outlier_at in range(1, 60):
        found = past_bytes(ranks, BLOCK_BYTES // 100, 1, kind=kind, outlier_at=outlier_at)
        assert found == [0] * ranks


def reduce_forced(dtype, op, past_cache_on):
    """Past the caches on some of the ranks, all or none: the result is the closed form's."""
    hvd.init()
    forced = hvd.rank() in past_cache_on
    counters = worlds.current().team.engine.counters
    before = counters()["past_cache_bytes"]
    _core.force_past_cache(forced)
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
        alone = worlds.current().placement.local_size == 1
        passes = forced and not alone and HAS_STORES
        assert (counters()["past_cache_bytes"] > before) == passes
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
