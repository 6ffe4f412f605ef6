"""allreduce: every element type and op, around every limit, on one host and on several."""

import hashlib

import pytest
import torch

import hvdlite as hvd
from tests.core import limits, oracles

pytestmark = [pytest.mark.ranks(*limits.SIZES), pytest.mark.hosts(*limits.LAYOUTS)]


def reduce_by_closed_form(dtype, knobs):
    """Synchronously, input and result apart, one after the other."""
    hvd.init()
    wrong = []
    for op in oracles.ops_of(dtype):
        for count in limits.counts(knobs, dtype, hvd.size(), large=op == "Sum"):
            given, expected = oracles.case_of(dtype, op, hvd.rank(), hvd.size(), count)
            kept = given.clone()
            got = hvd.allreduce(given, op=getattr(hvd, op))
            if problem := oracles.mismatch(got, expected, exact=op != "Average"):
                wrong.append(f"{op} of {count}: {problem}")
            if not torch.equal(given, kept):
                wrong.append(f"{op} of {count}: the input has changed")
    assert not wrong, "\n".join(wrong)


# The types that run on many ranks in make test.
SOME = ("int8", "float32", "bfloat16", "bool")


def reduce_in_place_all_at_once(dtype, knobs):
    """Asynchronously and in place, all in flight together, each rank in an order of its own."""
    hvd.init()
    tensors, expected, handles = {}, {}, {}
    for op in oracles.ops_of(dtype):
        for count in limits.counts(knobs, dtype, hvd.size(), large=op == "Sum"):
            name = f"{op}.{count}"
            case = oracles.case_of(dtype, op, hvd.rank(), hvd.size(), count)
            tensors[name], expected[name] = case
    names = list(tensors)
    turn = len(names) * hvd.rank() // hvd.size()
    for name in names[turn:] + names[:turn]:
        op = getattr(hvd, name.partition(".")[0])
        handles[name] = hvd.allreduce_async_(tensors[name], name=name, op=op)
    wrong = []
    for name in reversed(names):
        got = hvd.synchronize(handles[name])
        if got.data_ptr() != tensors[name].data_ptr():
            wrong.append(f"{name}: the result is another tensor")
        exact = not name.startswith("Average")
        if problem := oracles.mismatch(got, expected[name], exact=exact):
            wrong.append(f"{name}: {problem}")
    assert not wrong, "\n".join(wrong)


# Each type's kernels are tested by themselves (test_kernels.py), for any number of inputs.
OTHER_THAN_PAIRS = tuple(
    shape for shape in (*limits.SIZES, *limits.LAYOUTS) if shape not in (2, "1,1")
)


@pytest.mark.parametrize(
    "dtype", oracles.mostly_on_few_ranks(oracles.DTYPES, SOME, OTHER_THAN_PAIRS)
)
def test_every_op_on_every_type_gives_its_closed_form(world, dtype):
    world.run(reduce_by_closed_form, dtype, "default knobs")


@pytest.mark.parametrize("dtype", oracles.WIDTHS)
def test_tensors_of_many_pieces_give_the_closed_form(world, dtype):
    world.run(reduce_by_closed_form, dtype, "tiny knobs", knobs=limits.TINY)


@pytest.mark.parametrize("knobs", limits.KNOBS)
@pytest.mark.parametrize("dtype", oracles.mostly_on_few_ranks(oracles.WIDTHS, ("float32",)))
def test_many_at_once_in_place_give_the_closed_form(world, dtype, knobs):
    world.run(reduce_in_place_all_at_once, dtype, knobs, knobs=limits.KNOBS[knobs])


def reduce_as_mpi(dtype, op):
    from mpi4py import MPI

    hvd.init()
    mpi_op = {"Sum": MPI.SUM, "Min": MPI.MIN, "Max": MPI.MAX, "Product": MPI.PROD}[op]
    generator = torch.Generator().manual_seed(hvd.rank())
    # Whole numbers and powers of two: in any order they add up and multiply to the same.
    given = torch.randint(-100, 100, (100_003,), generator=generator)
    if op == "Product":
        given = 2 ** (given % 3)
    given = given.to(getattr(torch, dtype))
    expected = torch.empty_like(given)
    MPI.COMM_WORLD.Allreduce(given.numpy(), expected.numpy(), mpi_op)
    problem = oracles.mismatch(hvd.allreduce(given, op=getattr(hvd, op)), expected)
    assert not problem, problem


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        ("float32", "Sum"),
        ("int64", "Sum"),
        ("float64", "Max"),
        ("int32", "Min"),
        ("int32", "Product"),
    ],
)
def test_it_gives_what_the_allreduce_of_mpi_gives(world, dtype, op):
    world.run(reduce_as_mpi, dtype, op)


def digests_of_sums_that_round(dtype):
    hvd.init()
    generator = torch.Generator().manual_seed(hvd.rank())
    digests = []
    for count in (7, 997, 100_003):
        given = torch.randn(count, generator=generator).to(getattr(torch, dtype))
        got = hvd.allreduce(given, op=hvd.Sum)
        digests.append(hashlib.sha256(got.view(torch.uint8).numpy().tobytes()).hexdigest())
    return tuple(digests)


@pytest.mark.parametrize("dtype", oracles.FLOATS)
def test_all_ranks_get_the_same_bits(world, dtype):
    assert len(set(world.run(digests_of_sums_that_round, dtype))) == 1


def scale_before_and_after(dtype, op):
    hvd.init()
    given, expected = oracles.case_of(dtype, op, hvd.rank(), hvd.size(), 1001)
    # Divided by 2 first, then multiplied by 4: exact, and no input is 1 or 0 by chance.
    got = hvd.allreduce(given, op=getattr(hvd, op), prescale_factor=0.5, postscale_factor=4.0)
    problem = oracles.mismatch(got, (expected.double() * 2).to(got.dtype), exact=op == "Sum")
    assert not problem, problem


@pytest.mark.parametrize(
    ("dtype", "op"), [("float16", "Sum"), ("float32", "Average"), ("float64", "Sum")]
)
def test_the_scale_factors_are_applied_before_and_after(world, dtype, op):
    world.run(scale_before_and_after, dtype, op)


def average_bools():
    hvd.init()
    try:
        hvd.allreduce(torch.ones(3, dtype=torch.bool), op=hvd.Average)
    except ValueError as error:
        return str(error)
    raise AssertionError("no error")


@pytest.mark.ranks(2)
@pytest.mark.hosts
def test_the_average_of_bools_is_an_error(world):
    assert all("bool" in text for text in world.run(average_bools))


def reduce_a_matrix_that_is_not_contiguous():
    hvd.init()
    given = torch.arange(12.0).reshape(3, 4).t() + hvd.rank()
    got = hvd.allreduce(given, op=hvd.Sum)
    first = hvd.size() * (hvd.size() - 1) / 2
    expected = torch.arange(12.0).reshape(3, 4).t() * hvd.size() + first
    assert torch.equal(got, expected)
    try:
        hvd.allreduce_(given, op=hvd.Sum)
    except ValueError as error:
        return str(error)
    raise AssertionError("no error")


@pytest.mark.ranks(3)
@pytest.mark.hosts
def test_a_tensor_that_is_not_contiguous_is_copied_but_not_changed_in_place(world):
    assert all("contiguous" in text for text in world.run(reduce_a_matrix_that_is_not_contiguous))
