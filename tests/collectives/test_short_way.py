"""A blocking allreduce of ordinary tensors in one call of the core: what it takes, the results."""

import math

import numpy as np
import pytest
import torch

import hvdlite as hvd
from hvdlite import _core
from hvdlite.ops import DTYPES
from hvdlite.world.teams.process_sets import team_of

DTYPES_OF_THE_SHORT_WAY = [dtype for dtype in DTYPES if dtype is not torch.bool]


class Subclass(torch.Tensor):
    pass


@pytest.fixture(scope="module", autouse=True)
def world_of_one():
    hvd.init()
    yield
    hvd.shutdown()


def short_way(
    tensor,
    name="x",
    op=hvd.Sum,
    prescale=1.0,
    postscale=1.0,
    *,
    result=None,
    timeout_s=-1.0,
    site="",
    due_s=math.inf,
):
    team = team_of("allreduce_", hvd.global_process_set)
    return team.run_allreduce(
        *(tensor, result, name, op, prescale, postscale, timeout_s, site, due_s)
    )


@pytest.mark.parametrize("dtype", DTYPES_OF_THE_SHORT_WAY, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (1, 2, 1, 4), (2,) * 8], ids=str)
def test_takes_ordinary_tensors(dtype, shape):
    tensor = torch.full(shape, 3, dtype=dtype)
    assert (
        short_way(tensor, prescale=2.0, postscale=0.5 if dtype.is_floating_point else 1.0) is None
    )
    expected = 3 if dtype.is_floating_point else 6
    assert tensor.equal(torch.full(shape, expected, dtype=dtype))


def test_takes_views_parameters_and_inference_tensors():
    rows = torch.arange(12.0).reshape(4, 3)
    assert short_way(rows[1:3], prescale=2.0) is None
    assert rows.tolist() == [[0, 1, 2], [6, 8, 10], [12, 14, 16], [9, 10, 11]]
    parameter = torch.nn.Parameter(torch.ones(2))
    assert short_way(parameter, prescale=2.0) is None
    assert parameter.tolist() == [2, 2]
    with torch.inference_mode():
        assert short_way(torch.ones(2)) is None


def resized(count, begin=0, size_bytes=0):
    """A tensor at `begin` of a storage that was freed, as sharded parameters are, or shrunk."""
    tensor = torch.ones(count)
    view = tensor[begin:]
    tensor.untyped_storage().resize_(size_bytes)
    return view


def test_a_result_apart_leaves_the_tensor_as_it_is():
    tensor, result = torch.full((2, 3), 2.0), torch.zeros(2, 3)
    assert short_way(tensor, prescale=0.5, result=result) is None
    assert tensor.equal(torch.full((2, 3), 2.0))
    assert result.equal(torch.ones(2, 3))


def test_autograd_is_not_told_where_the_caller_names_the_result():
    tensor = torch.full((2, 3), 2.0)
    version = tensor._version
    assert short_way(tensor, lambda: "run", prescale=0.5, result=tensor) is None
    assert tensor.equal(torch.ones(2, 3))
    assert tensor._version == version  # as with c10d's other backends


REFUSED = {
    "a list": [1.0],
    "a subclass": torch.ones(2).as_subclass(Subclass),
    "not contiguous": torch.ones(2, 3).T,
    "every other element": torch.ones(4)[::2],
    "negated": torch._neg_view(torch.ones(1)),
    "bool": torch.ones(2, dtype=torch.bool),
    "uint16": torch.ones(2, dtype=torch.uint16),
    "complex": torch.ones(2, dtype=torch.complex64),
    "sparse": torch.eye(2).to_sparse(),
    "without memory": torch.ones(2, device="meta"),
    "freed": resized(8),
    "freed, of a later begin": resized(8, 2),
    "freed, of a begin much later": resized(5000, 4000),
    "shrunk": resized(20_000, 0, 79_996),
    "shrunk, of a later begin": resized(20_000, 2, 79_996),
    "zeros without memory": torch._efficientzerotensor(2),
    "without elements": torch.ones(0, 3),
    "many dimensions": torch.ones((1,) * 9),
    "an array": np.ones(2),
}


@pytest.mark.parametrize("tensor", REFUSED.values(), ids=REFUSED)
def test_leaves_other_tensors_to_the_long_way(tensor):
    assert short_way(tensor, pytest.fail) is NotImplemented  # and takes no number


@pytest.mark.parametrize("result", REFUSED.values(), ids=REFUSED)
def test_leaves_other_results_to_the_long_way(result):
    assert short_way(torch.ones(2), pytest.fail, result=result) is NotImplemented


@pytest.mark.parametrize(
    "result",
    [torch.ones(3), torch.ones(1, 2), torch.ones(2, dtype=torch.int32)],
    ids=["size", "shape", "dtype"],
)
def test_leaves_a_result_that_is_not_like_the_tensor_to_the_long_way(result):
    assert short_way(torch.ones(2), pytest.fail, result=result) is NotImplemented


def test_leaves_all_to_the_long_way_when_something_is_due():
    assert short_way(torch.ones(2), pytest.fail, due_s=0.0) is NotImplemented


@pytest.mark.parametrize(
    ("argument", "error"),
    [
        pytest.param({"name": lambda: 3}, TypeError, id="name of a number"),
        pytest.param({"name": "x\0y"}, ValueError, id="name with a NUL"),
        pytest.param({"name": lambda: "x\0y"}, ValueError, id="made name with a NUL"),
        pytest.param({"timeout_s": None}, TypeError, id="no timeout"),
        pytest.param({"due_s": None}, TypeError, id="no time when due"),
        pytest.param({"site": 3}, TypeError, id="site of a number"),
        pytest.param({"site": "x\0y"}, ValueError, id="site with a NUL"),
    ],
)
def test_bad_arguments_are_errors(argument, error):
    tensor = torch.ones(2)
    with pytest.raises(error):
        short_way(tensor, **argument)
    assert tensor.tolist() == [1, 1]


@pytest.mark.parametrize(
    "arguments",
    [
        {"name": None},
        {"name": b"x"},
        {"op": None},
        {"op": 99},
        {"op": 2**70},
        {"op": -1},
        {"op": "SUM"},
        {"op": _core.BAND},
        {"op": hvd.Adasum},
        {"prescale": 1},
        {"postscale": "1"},
        {"postscale": None},
    ],
    ids=str,
)
def test_leaves_other_arguments_to_the_long_way(arguments):
    assert short_way(torch.ones(2), **arguments) is NotImplemented


def test_autograd_learns_of_the_change():
    tensor = torch.ones(2)
    saved = tensor * torch.ones(2, requires_grad=True)
    hvd.allreduce_(tensor, name="x", op=hvd.Sum)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def test_the_number_of_arguments_is_checked():
    with pytest.raises(TypeError, match="9 arguments expected, got 1"):
        team_of("allreduce_", hvd.global_process_set).run_allreduce(torch.ones(2))


def both_ways_meet():
    """Rank 0 takes the short path, the others the long one: both must post the same."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
        for dtype in DTYPES_OF_THE_SHORT_WAY:
            for shape in ((), (5,), (2, 3), (70_000,)):
                tensor = torch.full(shape, rank + 1, dtype=dtype)
                given = tensor if rank == 0 else tensor.as_subclass(Subclass)
                made = hvd.allreduce(given, op=op)
                hvd.allreduce_(given, op=op)
                inputs = torch.arange(1, size + 1).to(torch.float64)
                wanted = {
                    hvd.Average: inputs.mean(),
                    hvd.Sum: inputs.sum(),
                    hvd.Min: inputs.min(),
                    hvd.Max: inputs.max(),
                    hvd.Product: inputs.prod(),
                }[op]
                for found in (tensor, made.as_subclass(torch.Tensor)):
                    torch.testing.assert_close(found, wanted.to(dtype).expand(shape))


def failures_are_the_same():
    hvd.init()
    tensor = torch.ones(2 + (hvd.rank() == 1))
    with pytest.raises(hvd.HorovodInternalError, match="rank 1"):
        hvd.allreduce_(tensor, name="shapes differ", op=hvd.Sum)
    if hvd.rank() != 0:
        hvd.barrier()
    handle = hvd.allreduce_async_(torch.ones(2), name="twice", op=hvd.Sum)
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match="in flight already"):
            hvd.allreduce_(torch.ones(2), name="twice", op=hvd.Sum)
        hvd.barrier()
    hvd.synchronize(handle)


@pytest.mark.ranks(2)
@pytest.mark.hosts("1,1")
def test_both_ways_meet(world):
    world.run(both_ways_meet)


@pytest.mark.ranks(2)
@pytest.mark.hosts("1,1")
def test_failures_are_the_same(world):
    world.run(failures_are_the_same)
