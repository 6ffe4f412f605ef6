"""A posting describes one operation: what it accepts and refuses, and how long it keeps tensors."""

import gc
import time
import weakref

import pytest
import torch

import hvdlite as hvd
from hvdlite import _core
from hvdlite.world import world as worlds


def sum_of(x, **more):
    return _core.posting(_core.ALLREDUCE, "x", False, _core.FLOAT32, x, x, _core.SUM, **more)


def post_what_is_wrong():
    hvd.init()
    post = worlds.current().team.engine.post
    x = torch.ones(4)
    posting = sum_of(x)
    with pytest.raises(TypeError, match="has no argument 'kind', or has it already"):
        posting.replace(kind=_core.ALLGATHER)
    with pytest.raises(TypeError, match="has no argument 'name', or has it already"):
        _core.posting(0, "x", False, _core.FLOAT32, name="y")
    with pytest.raises(TypeError, match="has no argument 'colour'"):
        posting.replace(colour=1)
    with pytest.raises(TypeError, match="keywords only"):
        posting.replace(1)
    with pytest.raises(ValueError, match="NUL character"):
        posting.replace(name="x\0y")
    for field, value in (("place", 3), ("op", 2**40), ("dtype", -1)):
        with pytest.raises(ValueError, match=f"{field} is "):
            posting.replace(**{field: value})
    with pytest.raises(OverflowError):
        posting.replace(place=2**70)
    with pytest.raises(ValueError, match="root is -1"):
        _core.posting(_core.BROADCAST, "x", False, _core.FLOAT32, x, x, root=-1)
    with pytest.raises(AttributeError):
        posting.replace(source=object())
    for kind in (_core.ALLREDUCE, _core.BROADCAST, _core.ALLGATHER, _core.ALLTOALL):
        with pytest.raises(ValueError, match="the source is missing"):
            post(_core.posting(kind, "x", False, _core.FLOAT32))
    with pytest.raises(ValueError, match="the source is missing"):
        post(posting.replace(source=None))
    with pytest.raises(AttributeError):
        post(posting.replace(result=object()))
    with pytest.raises(TypeError, match="expected a Posting"):
        post(x)
    assert post(posting).wait() is None
    assert x.tolist() == [hvd.size()] * 4


@pytest.mark.ranks(1, 2)
def test_a_posting_that_is_wrong_is_an_error_and_no_crash(world):
    world.run(post_what_is_wrong)


def broadcast_without_a_root():
    hvd.init()
    x = torch.full((4,), float(hvd.rank()))
    posting = _core.posting(_core.BROADCAST, "x", False, _core.FLOAT32, x, x)
    assert posting.root == 0
    assert worlds.current().team.engine.post(posting).wait() is None
    return x.tolist()


@pytest.mark.ranks(2)
@pytest.mark.hosts("1,1")
def test_the_root_is_rank_0_where_none_is_given(world):
    assert world.run(broadcast_without_a_root) == [[0.0] * 4] * world.size


def references(elems):
    """Whether the tensor of an operation without a handle lives: in flight, and after the end."""
    hvd.init()
    engine = worlds.current().team.engine
    x = torch.ones(elems)
    kept = weakref.ref(x)
    alive = []
    if hvd.rank() == 0:
        posting = sum_of(x)
        operation = engine.post(posting)
        with pytest.raises(ValueError, match="in flight already"):
            engine.post(posting)
        del posting, operation, x
        gc.collect()
        alive.append(kept() is not None)
    hvd.barrier()
    if hvd.rank() != 0:
        engine.post(sum_of(x)).wait()
        del x
    for _ in range(50):  # each gives back what has ended; the sum may end later here than there
        hvd.barrier()
        time.sleep(0.01)
    gc.collect()
    return [*alive, kept() is not None]


@pytest.mark.ranks(2)
@pytest.mark.hosts("1,1")
@pytest.mark.parametrize("elems", [4, 300_000])
def test_a_tensor_lives_until_its_operation_has_ended_and_no_longer(world, elems):
    first, *others = world.run(references, elems)
    assert first == [True, False]
    assert others == [[False]] * (world.size - 1)
