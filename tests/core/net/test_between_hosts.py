"""Sums between hosts: each algorithm over MPI, and the order of summation of the deterministic
mode."""

import functools
import itertools

import pytest
import torch

import hvdlite as hvd
from hvdlite import _core
from hvdlite.world import world as worlds
from tests.core import limits, oracles

ALGORITHMS = ("ring", "direct", "recursive_doubling")

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.hosts("1,1", "1,1,1", "2,1,1", "1,3,3"),
    pytest.mark.wide_in("1,1,1", "1,3,3"),
]


def sums_of_every_size(dtype):
    hvd.init()
    wrong = []
    for count in limits.counts("tiny knobs", dtype, hvd.size()):
        given, expected = oracles.case_of(dtype, "Sum", hvd.rank(), hvd.size(), count)
        got = hvd.allreduce(given, op=hvd.Sum, name=f"{count}")
        if problem := oracles.mismatch(got, expected):
            wrong.append(f"{count}: {problem}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.wide)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_each_algorithm_adds_up_everything(world, algorithm, dtype):
    world.run(sums_of_every_size, dtype, knobs={**limits.TINY, "HVDLITE_ALGORITHM": algorithm})


# ---- the deterministic mode ----

COUNT = 3000


def given_by(rank, dtype):
    """Sums of these depend on their order."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(COUNT, generator=generator, dtype=torch.float64)
    return (values * 10.0 ** (values * 2).round().clamp(-3, 3)).to(dtype)


def add_in_order(inputs):
    """float16 and bfloat16 in float32, rounded once."""
    wide = torch.float32 if inputs[0].itemsize == 2 else inputs[0].dtype
    return functools.reduce(torch.add, [each.to(wide) for each in inputs]).to(inputs[0].dtype)


def expected_sum(hosts, dtype):
    """hosts: how many ranks each has. Local rank by local rank, then host by host."""
    ranks = iter(range(sum(hosts)))
    return add_in_order(
        [add_in_order([given_by(next(ranks), dtype) for _ in range(size)]) for size in hosts]
    )


def travel_in_many_ways(hosts, dtype_name):
    """The paths that an element can take on which the bits differ."""
    hvd.init()
    dtype = getattr(torch, dtype_name)
    own, expected = given_by(hvd.rank(), dtype), expected_sum(hosts, dtype)
    wrong = []

    def check(got, begin, how):
        if not torch.equal(got, expected[begin : begin + len(got)]):
            wrong.append(how)

    for begin, end in ((0, COUNT), (7, 8), (100, 131), (1000, 1600), (5, 2999)):
        part = f"{begin} to {end}"
        check(hvd.allreduce(own[begin:end], op=hvd.Sum, name=part), begin, part)
    cuts = [0, 1, 40, 777, 778, 2500, COUNT]
    parts = [own[begin:end].clone() for begin, end in itertools.pairwise(cuts)]
    for got, begin in zip(hvd.grouped_allreduce(parts, op=hvd.Sum), cuts, strict=False):
        check(got, begin, f"in a group, from {begin}")
    engine = worlds.current().team.engine
    for begin, end in ((0, COUNT), (64, 66)):
        x = own[begin:end].clone()
        number, address = getattr(_core, dtype_name.upper()), x.data_ptr()
        name = f"plan {begin}"
        plan = engine.plan(name, number, _core.SUM, address, address, len(x), 1.0, 1.0, x)
        assert plan.start(x).wait() is None
        check(x, begin, name)
    rows = hvd.reducescatter(own, op=hvd.Sum)
    everyones = hvd.allgather(rows)
    check(everyones, 0, "in a reducescatter")
    return wrong


def hosts_of(world):
    return [int(size) for size in world.hosts.split(",")]


KNOBS = {"default knobs": limits.DEFAULT, "tiny knobs": limits.TINY}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "algorithm",
    ["auto", "ring", *(pytest.param(name, marks=pytest.mark.wide) for name in ALGORITHMS[1:])],
)
@pytest.mark.parametrize("sizes", KNOBS)
def test_deterministic_sums_are_those_of_the_ranks_in_order_whatever_way_they_take(
    world, sizes, algorithm, dtype
):
    knobs = {**KNOBS[sizes], "HVDLITE_DETERMINISTIC": "1", "HVDLITE_ALGORITHM": algorithm}
    assert world.run(travel_in_many_ways, hosts_of(world), dtype, knobs=knobs) == [[]] * world.size


@pytest.mark.hosts("2,1,1")
@pytest.mark.parametrize("algorithm", ["ring", "recursive_doubling"])
def test_without_it_other_ways_give_other_bits_so_that_the_test_before_can_fail(world, algorithm):
    knobs = {**limits.TINY, "HVDLITE_ALGORITHM": algorithm}
    ways = world.run(travel_in_many_ways, hosts_of(world), "float32", knobs=knobs)
    assert all(f"0 to {COUNT}" in wrong for wrong in ways)
