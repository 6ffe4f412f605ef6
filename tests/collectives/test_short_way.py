"""allreduce_ of ordinary tensors in one call of the core: the tensors it takes, the results."""

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


def short_way(tensor, name="x", op=hvd.Sum, prescale=1.0, postscale=1.0):
    team = team_of("allreduce_", hvd.global_process_set)
    return team.allreduce_in_place(tensor, name, op, prescale, postscale)


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


def run(tensor, next_name=lambda: "run", op=hvd.Sum, prescale=1.0, timeout_s=-1.0, site=""):
    engine = team_of("allreduce_", hvd.global_process_set).engine
    return engine.run_allreduce(tensor, next_name, op, prescale, timeout_s, site)


def test_a_process_groups_short_way_does_not_tell_autograd():
    tensor = torch.full((2, 3), 2.0)
    version = tensor._version
    assert run(tensor, prescale=0.5) is None
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
    assert short_way(tensor) is NotImplemented


@pytest.mark.parametrize("tensor", REFUSED.values(), ids=REFUSED)
def test_a_refused_tensor_takes_no_name(tensor):
    assert run(tensor, next_name=pytest.fail) is NotImplemented


def test_a_process_groups_op_that_a_dtype_lacks_is_left_to_the_long_way():
    assert run(torch.ones(2), next_name=pytest.fail, op=_core.BAND) is NotImplemented


@pytest.mark.parametrize(
    ("argument", "error"),
    [
        pytest.param({"next_name": lambda: 3}, TypeError, id="name of a number"),
        pytest.param({"next_name": None}, TypeError, id="no name"),
        pytest.param({"next_name": lambda: "x\0y"}, ValueError, id="name with a NUL"),
        pytest.param({"op": 99}, ValueError, id="op out of range"),
        pytest.param({"op": "SUM"}, TypeError, id="op of a str"),
        pytest.param({"op": hvd.Average, "prescale": "1"}, TypeError, id="factor of a str"),
        pytest.param({"timeout_s": None}, TypeError, id="no timeout"),
        pytest.param({"site": 3}, TypeError, id="site of a number"),
        pytest.param({"site": "x\0y"}, ValueError, id="site with a NUL"),
    ],
)
def test_a_process_groups_bad_arguments_are_errors(argument, error):
    tensor = torch.ones(2)
    with pytest.raises(error):
        run(tensor, **argument)
    assert tensor.tolist() == [1, 1]


@pytest.mark.parametrize(
    "arguments",
    [
        {"name": None},
        {"name": b"x"},
        {"name": "x\0y"},
        {"op": None},
        {"op": int(hvd.Sum)},
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
    with pytest.raises(TypeError, match="5 arguments expected, got 1"):
        team_of("allreduce_", hvd.global_process_set).allreduce_in_place(torch.ones(2))


def both_ways_meet():
    """Rank 0 takes the short path, the others the long one: both must post the same."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
        for dtype in DTYPES_OF_THE_SHORT_WAY:
            for shape in ((), (5,), (2, 3), (70_000,)):
                tensor = torch.full(shape, rank + 1, dtype=dtype)
                given = tensor if rank == 0 else tensor.as_subclass(Subclass)
                hvd.allreduce_(given, name="meet", op=op)
                inputs = torch.arange(1, size + 1).to(torch.float64)
                wanted = {
                    hvd.Average: inputs.mean(),
                    hvd.Sum: inputs.sum(),
                    hvd.Min: inputs.min(),
                    hvd.Max: inputs.max(),
                    hvd.Product: inputs.prod(),
                }[op]
                torch.testing.assert_close(tensor, wanted.to(dtype).expand(shape))


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
