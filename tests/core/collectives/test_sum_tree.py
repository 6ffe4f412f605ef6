"""The deterministic mode: every way gives the bits of a tree over the ranks, on any layout."""

import itertools

import pytest
import torch

import hvdlite as hvd
from hvdlite import _core
from hvdlite.world import world as worlds
from hvdlite.world.teams import placement
from tests.core import limits, sum_tree

COUNT = 3000
DETERMINISTIC = {"HVDLITE_DETERMINISTIC": "1"}
DTYPES = ("float32", "bfloat16", "float16", "float64")
OPS = {
    "Sum": (hvd.Sum, 1.0, 1.0),
    "Average": (hvd.Average, 1.0, 1.0),
    "scaled": (hvd.Sum, 1 / 3, 0.7),
    "Product": (hvd.Product, 1.0, 1.0),
    "Min": (hvd.Min, -0.3, 1.7),
    "Max": (hvd.Max, 1.0, 1.0),
}


def expected_of(op_name, dtype, begin=0, end=COUNT, absent=()):
    op = {"scaled": "Sum"}.get(op_name, op_name)
    given = [
        None if rank in absent else sum_tree.draw(rank, COUNT, dtype)[begin:end]
        for rank in range(hvd.size())
    ]
    return sum_tree.reduced(given, op, *OPS[op_name][1:])


def plan_of(name, tensor, form=_core.PLAN_WHOLE, **options):
    number = getattr(_core, str(tensor.dtype).removeprefix("torch.").upper())
    address = tensor.data_ptr()
    return worlds.current().team.engine.plan(
        *(name, number, _core.SUM, address, address, len(tensor), 1.0, 1.0, tensor),
        form=form,
        **options,
    )


def travel_in_many_ways(dtype_name):
    """The paths that an element can take, on some of which it was added in another order."""
    hvd.init()
    dtype = getattr(torch, dtype_name)
    own = sum_tree.draw(hvd.rank(), COUNT, dtype)
    wrong = []

    def check(got, how, *expected_of_what):
        if not sum_tree.same_bits(got, expected_of(*expected_of_what)):
            wrong.append(f"{dtype_name} {how}")

    for op_name, (op, prescale, postscale) in OPS.items():
        for begin, end in ((0, COUNT), (7, 8), (5, 2999), (9, 9)):
            how = f"{op_name} of {begin} to {end}"
            factors = {"prescale_factor": prescale, "postscale_factor": postscale}
            got = hvd.allreduce(own[begin:end], op=op, name=f"{dtype} {how}", **factors)
            check(got, how, op_name, dtype, begin, end)
            in_place = own[begin:end].clone()
            hvd.allreduce_(in_place, op=op, name=f"{dtype} {how} in place", **factors)
            check(in_place, f"{how}, in place", op_name, dtype, begin, end)
    cuts = [0, 1, 40, 777, 778, 2500, COUNT]
    parts = [own[begin:end].clone() for begin, end in itertools.pairwise(cuts)]
    grouped = hvd.grouped_allreduce(parts, op=hvd.Average)
    for got, (begin, end) in zip(grouped, itertools.pairwise(cuts), strict=True):
        check(got, f"in a group, from {begin}", "Average", dtype, begin, end)
    for begin, end in ((0, COUNT), (64, 66)):
        x = own[begin:end].clone()
        plan = plan_of(f"{dtype} plan {begin}", x)
        for _ in range(2):
            x.copy_(own[begin:end])
            assert plan.start(x).wait() is None
            check(x, f"in a plan from {begin}", "Sum", dtype, begin, end)
    check(hvd.allgather(hvd.reducescatter(own, op=hvd.Sum)), "in a reducescatter", "Sum", dtype)
    for root in range(hvd.size()):
        result = torch.empty_like(own)
        number = getattr(_core, dtype_name.upper())
        posting = _core.posting(
            *(_core.REDUCE, f"{dtype} to {root}", False, number, own),
            *(result if root == hvd.rank() else None, _core.SUM, root),
        )
        assert worlds.current().team.engine.post(posting, True).wait() is None
        if root == hvd.rank():
            check(result, f"reduced to {root}", "Sum", dtype)
    return wrong


def reduce_to_owners(dtype_name):
    hvd.init()
    dtype = getattr(torch, dtype_name)
    wrong = []
    expected = expected_of("Sum", dtype)
    number = getattr(_core, dtype_name.upper())
    for form in (_core.PLAN_TO_OWNERS, _core.PLAN_TO_HOST_OWNERS):
        x = sum_tree.draw(hvd.rank(), COUNT, dtype)
        plan = plan_of(f"{dtype} {form}", x, form)
        assert plan.start(x).wait() is None
        for begin, end in worlds.current().team.engine.owned(COUNT, number, form, hvd.rank()):
            if not sum_tree.same_bits(x[begin:end], expected[begin:end]):
                wrong.append(f"{dtype_name} {form}: {begin} to {end}")
    return wrong


def go_all_ways():
    ways = (travel_in_many_ways, reduce_to_owners)
    return [text for dtype in DTYPES for way in ways for text in way(dtype)]


@pytest.mark.ranks(2, 4, 7)
@pytest.mark.hosts("2,2", "3,1", "1,2,1", "1,1,1,1", "1,3,3")
@pytest.mark.wide_in(2, 7, "1,3,3", "1,2,1")
@pytest.mark.parametrize(
    ("sizes", "algorithm"),
    [
        (limits.TINY, "auto"),
        (limits.TINY, "recursive_doubling"),
        pytest.param(limits.DEFAULT, "auto", marks=pytest.mark.wide),
        pytest.param(limits.TINY, "ring", marks=pytest.mark.wide),
    ],
    ids=["tiny", "recursive doubling", "default", "ring"],
)
def test_every_way_gives_the_bits_of_the_tree(world, sizes, algorithm):
    knobs = {**sizes, **DETERMINISTIC, "HVDLITE_ALGORITHM": algorithm}
    assert world.run(go_all_ways, knobs=knobs) == [[]] * world.size


def on_interleaved_hosts(leaders):
    """leaders: by rank, the first rank of its pretended host."""
    hvd.shutdown()
    kept = placement.pretended_leaders
    placement.pretended_leaders = lambda counts: list(leaders)
    try:
        hvd.init()
        assert worlds.current().placement.local_size == leaders.count(leaders[hvd.rank()])
        return go_all_ways()
    finally:
        placement.pretended_leaders = kept
        hvd.shutdown()


@pytest.mark.hosts("2,2")
@pytest.mark.parametrize(
    "leaders", [(0, 1, 0, 1), pytest.param((0, 1, 1, 0), marks=pytest.mark.wide)]
)
def test_ranks_that_alternate_between_hosts_give_them_too(world, leaders):
    ways = world.run(on_interleaved_hosts, leaders, knobs={**limits.TINY, **DETERMINISTIC})
    assert ways == [[]] * world.size


def while_some_have_joined(absent):
    hvd.init()
    wrong, postings = [], []
    if hvd.rank() in absent:
        hvd.join()
        return wrong
    for dtype, op_name in itertools.product((torch.float32, torch.bfloat16), ("Sum", "scaled")):
        own = sum_tree.draw(hvd.rank(), COUNT, dtype)
        _, prescale, postscale = OPS[op_name]
        for begin, end in ((0, COUNT), (7, 8)):
            got = hvd.allreduce(
                own[begin:end],
                op=hvd.Sum,
                prescale_factor=prescale,
                postscale_factor=postscale,
                name=f"{dtype} {op_name} {begin}",
            )
            postings.append((got, op_name, dtype, begin, end))
    for got, *what in postings:
        if not sum_tree.same_bits(got, expected_of(*what, absent=absent)):
            wrong.append(str(what))
    hvd.join()
    return wrong


@pytest.mark.ranks(4)
@pytest.mark.hosts("2,2", "3,1")
@pytest.mark.parametrize("absent", [(1,), (3,), pytest.param((2, 3), marks=pytest.mark.wide)])
def test_ranks_that_have_joined_are_left_out_of_the_tree(world, absent):
    ways = world.run(while_some_have_joined, absent, knobs={**limits.TINY, **DETERMINISTIC})
    assert ways == [[]] * world.size


def sent_bytes(dtype_name, count):
    """What this rank sends to other hosts in an allreduce."""
    hvd.init()
    engine = worlds.current().team.engine
    x = torch.ones(count, dtype=getattr(torch, dtype_name))
    hvd.allreduce(x, op=hvd.Sum, name="first")
    hvd.barrier()
    before = engine.counters()["data_bytes"]
    hvd.allreduce(x, op=hvd.Sum, name="second")
    sent = engine.counters()["data_bytes"] - before
    hvd.barrier()
    return sent


@pytest.mark.hosts("2,2", "3,1", "1,1,1,1")
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.wide)])
@pytest.mark.above_mpi
def test_a_host_sends_its_partials_and_its_sums(world, dtype):
    count = 1 << 18
    hosts = [int(size) for size in world.hosts.split(",")]
    wide = 2 if dtype == "bfloat16" and max(hosts) > 1 else 1
    slice_bytes = count * getattr(torch, dtype).itemsize // min(hosts)
    expected = []
    for size in hosts:
        partials = 2 if size == 3 else 1
        each = slice_bytes * (len(hosts) - 1) * (partials * wide + 1) // len(hosts)
        expected += [each] * min(hosts) + [0] * (size - min(hosts))
    assert world.run(sent_bytes, dtype, count, knobs=DETERMINISTIC) == expected


def plans_with_weights_are_refused():
    hvd.init()
    with pytest.raises(ValueError, match="without the deterministic mode"):
        plan_of("weighted", torch.ones(4), weighted=4)


@pytest.mark.ranks(2)
def test_a_plan_takes_no_weights_since_the_tree_has_none(world):
    world.run(plans_with_weights_are_refused, knobs=DETERMINISTIC)


@pytest.mark.hosts("3,1")
@pytest.mark.parametrize("algorithm", ["ring", "direct"])
def test_without_it_layouts_give_other_bits_so_that_these_tests_can_fail(world, algorithm):
    ways = world.run(go_all_ways, knobs={**limits.TINY, "HVDLITE_ALGORITHM": algorithm})
    assert all("float32 Sum of 0 to 3000" in wrong for wrong in ways)
