"""Runs of plans with weights, on one host: against sums in the order of the ranks."""

import itertools
import math

import pytest
import torch

import hvdlite as hvd
from hvdlite import _core
from hvdlite.world import world as worlds
from tests.core import limits
from tests.core.scaling import times, widened

FORMS = {
    "whole": _core.PLAN_WHOLE,
    "to owners": _core.PLAN_TO_OWNERS,
    "to the host's owners": _core.PLAN_TO_HOST_OWNERS,
}
COUNTS = (1, 2, 33, 251, 1001, 4097, 10_007)
# Op and factors of the plan: an average, and a sum that the factors make one.
OPS = {"Average": (_core.AVERAGE, 1.0), "predivided": (_core.SUM, 4.0)}
# By rank; and whether the inputs have been multiplied.
WEIGHTS = {
    "unequal": ([3.0, 0.7, 1e3, 0.0, 5.0, 1 / 3, 2.0], [False]),
    "in the input": ([3.0, 0.7, 1e3, 0.0, 5.0, 1 / 3, 2.0], [True]),
    "both": ([3.0, 0.7, 1e3, 0.0, 5.0, 1 / 3, 2.0], [True, False]),
    "zeros": ([0.0] * 7, [False]),
}

pytestmark = pytest.mark.above_mpi


def plan_of(name, tensor, form=_core.PLAN_WHOLE, op=_core.AVERAGE, predivide=1.0, **options):
    number = getattr(_core, str(tensor.dtype).removeprefix("torch.").upper())
    post = 1.0 if op == _core.AVERAGE else predivide / hvd.size()
    return worlds.current().team.engine.plan(
        *(name, number, op, tensor.data_ptr(), tensor.data_ptr(), tensor.numel()),
        *(1 / predivide, post, tensor),
        form=form,
        **options,
    )


def given(rank, count, dtype):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)


def average(op, predivide, inputs, size, factors=None, of_all=None):
    """In the order of the ranks. of_all: what it is divided by in place of the size."""
    factors = [1.0] * len(inputs) if factors is None else factors
    parts = [
        times(factor / predivide, widened(x)) for factor, x in zip(factors, inputs, strict=True)
    ]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    to_weighted = 1.0 if of_all is None else size / of_all
    post = to_weighted / size if op == _core.AVERAGE else predivide / size * to_weighted
    return times(post, total).to(inputs[0].dtype)


def parts_of(tensor, form):
    if form == _core.PLAN_WHOLE:
        return [(0, len(tensor))]
    number = getattr(_core, str(tensor.dtype).removeprefix("torch.").upper())
    return worlds.current().team.engine.owned(len(tensor), number, form, hvd.rank())


def weighs(dtype_name):
    hvd.init()
    rank, size, dtype = hvd.rank(), hvd.size(), getattr(torch, dtype_name)
    wrong = []
    every = itertools.product(COUNTS, FORMS, OPS, WEIGHTS)
    for number, (count, form, op_name, kind) in enumerate(every):
        op, predivide = OPS[op_name]
        weights, in_input = WEIGHTS[kind][0][:size], WEIGHTS[kind][1]
        is_in_input = [in_input[r % len(in_input)] for r in range(size)]
        # The last ones count as they are.
        weighted = (0, 1, count // 2, count)[number % 4]
        inputs = [given(r, count, dtype) for r in range(size)]
        own = inputs[rank].clone()
        plan = plan_of(f"{number}", own, FORMS[form], op, predivide, weighted=weighted)
        text = plan.start(own, weights[rank], is_in_input[rank]).wait()
        plain = average(op, predivide, inputs, size)
        if sum(weights) == 0 or (size == 1 and not is_in_input[0]):
            right = plain
        else:
            factors = [1.0 if i else w for i, w in zip(is_in_input, weights, strict=True)]
            right = average(op, predivide, inputs, size, factors, sum(weights))
        right[weighted:] = plain[weighted:]
        for begin, end in parts_of(own, FORMS[form]):
            if not torch.equal(own[begin:end], right[begin:end]):
                wrong.append((number, count, weighted, form, op_name, kind, begin, end))
        if text:
            wrong.append(text)
    return wrong


DTYPES = [
    "float32",
    "bfloat16",
    *(pytest.param(d, marks=pytest.mark.wide) for d in ("float16", "float64")),
]
KNOBS = ["tiny knobs", "default knobs"]


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.wide_in(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("knobs", KNOBS)
def test_the_first_elements_are_weighted_and_the_others_are_averages(world, knobs, dtype):
    assert world.run(weighs, dtype, knobs=limits.KNOBS[knobs]) == [[]] * world.size


def equal(some_have_none):
    hvd.init()
    found = []
    for count in (5, 10_007):
        plain, weighted = (given(hvd.rank(), count, torch.float32) for _ in range(2))
        assert plan_of("plain", plain).start(plain).wait() is None
        plan = plan_of("weighted", weighted, weighted=count)
        weight = None if some_have_none and hvd.rank() else 0.1
        assert plan.start(weighted, weight).wait() is None
        found.append(torch.equal(plain, weighted))
    return found


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("some_have_none", [False, True])
def test_equal_weights_give_the_bits_of_none_and_so_does_a_rank_without(world, some_have_none):
    assert world.run(equal, some_have_none) == [[True, True]] * world.size


def one_has_joined(weights):
    hvd.init()
    rank, size, count = hvd.rank(), hvd.size(), 50_000
    tensor = given(rank, count, torch.float32)
    plan = plan_of("with a joined rank", tensor, weighted=count - 7)
    # So that it is made everywhere.
    assert plan.start(tensor).wait() is None
    hvd.barrier()
    if rank:
        own = given(rank, count, torch.float32)
        tensor.copy_(own)
        assert plan.start(tensor, weights[rank]).wait() is None
        inputs = [given(r, count, torch.float32) for r in range(1, size)]
        total = sum(weights[1:size])
        is_equal = len(set(weights[1:size])) == 1
        factors, total = (None, size - 1) if is_equal else (weights[1:size], total)
        right = average(_core.AVERAGE, 1.0, inputs, size, factors, total)
        right[-7:] = average(_core.AVERAGE, 1.0, inputs, size)[-7:]
        assert torch.equal(tensor, right)
    hvd.join()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.wide_in(4)
@pytest.mark.parametrize("weights", [[9, 2.0, 0.3, 5.0], [9, 4.0, 4.0, 4.0]])
def test_a_joined_rank_adds_up_for_the_others_with_their_weights(world, weights):
    world.run(one_has_joined, weights)


def refused():
    hvd.init()
    tensor, whole = torch.ones(4), torch.ones(4, dtype=torch.int32)
    for options in (
        {"weighted": 5},
        {"weighted": -1},
        {"weighted": 4, "form": _core.PLAN_UNITE, "op": _core.SUM},
    ):
        with pytest.raises(ValueError, match="weighted is at most count"):
            plan_of("bad", tensor, **options)
    with pytest.raises(ValueError, match="adds up floats on one host"):
        plan_of("bad", whole, weighted=4)
    if hvd.size() > hvd.local_size():
        with pytest.raises(ValueError, match="adds up floats on one host"):
            plan_of("bad", tensor, weighted=4)
        return
    plan = plan_of("good", tensor, weighted=4)
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="a weight is 0 or a positive, finite number"):
            plan.start(tensor, bad)
    with pytest.raises(TypeError):
        plan.start(tensor, "3")
    with pytest.raises(TypeError, match="1 to 3 arguments"):
        plan.start()


@pytest.mark.ranks(1)
@pytest.mark.hosts("1,1")
def test_only_floats_that_are_added_up_on_one_host_have_weights(world):
    world.run(refused)
