"""Bad arguments are ValueErrors at the call, and leave no trace."""

import functools
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import hvdlite as hvd
from hvdlite import _core
from hvdlite.world import world as worlds


def sparse(x):
    with torch.sparse.check_sparse_tensor_invariants():
        return x.to_sparse()


def calls():
    """The call, and a text that its error must contain."""
    x = torch.ones(3)
    flags = x > 0
    fp16 = hvd.Compression.fp16
    negated = torch.imag(torch.ones(3, dtype=torch.complex64).conj())
    return (
        (lambda: hvd.allreduce([1.0]), "allreduce: expected a torch.Tensor, got list"),
        (lambda: hvd.allreduce(np.ones(2)), "expected a torch.Tensor, got ndarray"),
        (lambda: hvd.allreduce_(None), "allreduce_: expected a torch.Tensor, got NoneType"),
        (lambda: hvd.allreduce(x.to(torch.complex64)), "complex64 is not supported"),
        (lambda: hvd.allreduce(x.to(torch.float8_e4m3fn)), "float8_e4m3fn is not supported"),
        (lambda: hvd.allreduce(flags), "bool has no Average; use op=Sum"),
        (lambda: hvd.allreduce(flags, op=hvd.Adasum), "bool has no Adasum"),
        (lambda: hvd.allreduce(flags, op=hvd.Sum, prescale_factor=2.0), "bool takes no scale"),
        (lambda: hvd.allreduce_(flags, op=hvd.Max, postscale_factor=0.5), "bool takes no scale"),
        (lambda: hvd.allreduce(x, op=17), "op=17 is not one of hvdlite's: Average, Sum"),
        (lambda: hvd.allreduce(x, op="sum"), "op='sum' is not one"),
        (lambda: hvd.allreduce(x, op=1), "op=1 is not one"),
        (lambda: hvd.allreduce(x, average=True, op=hvd.Sum), "average and op are both given"),
        (lambda: hvd.allreduce(sparse(x)), "a torch.sparse_coo tensor; expected a dense one"),
        (lambda: hvd.allreduce(x.to("meta")), "a Tensor on meta has no memory"),
        (lambda: hvd.allreduce(x[:0].to("meta")), "a Tensor on meta has no memory"),
        (lambda: hvd.allreduce(x, process_set=3), "process_set=3 is int, expected a ProcessSet"),
        (lambda: hvd.allreduce(x, process_set=[0]), r"process_set=\[0\] is list"),
        (lambda: hvd.allreduce(x, name=3), "name=3 is int, expected a str"),
        (lambda: hvd.allreduce(x, name=b"x"), "name=b'x' is bytes"),
        (lambda: hvd.allreduce(x, name="a\0b"), "NUL"),
        (lambda: hvd.allreduce(x, compression="fp16"), "'fp16', expected hvdlite.Compression.none"),
        (lambda: hvd.allreduce(x, compression=None), "compression=None, expected"),
        (lambda: hvd.allreduce([1.0], compression=fp16), "allreduce: expected a torch.Tensor, got"),
        (lambda: hvd.reducescatter(None, compression=fp16), "reducescatter: expected a torch"),
        (lambda: hvd.grouped_allreduce([1.0], compression=fp16), "expected a torch.Tensor, got"),
        (lambda: hvd.grouped_reducescatter([1.0], compression=fp16), "expected a torch.Tensor"),
        (lambda: hvd.allreduce(x, prescale_factor=None), "prescale_factor=None .* two numbers"),
        (lambda: hvd.allreduce_(x, postscale_factor="2x"), "postscale_factor='2x': expected two"),
        (lambda: hvd.allreduce_async(x, prescale_factor=x), "expected two numbers"),
        (lambda: hvd.allreduce_(torch.ones(3, 4).t()), r"not contiguous \(shape \(4, 3\)"),
        (lambda: hvd.allreduce_(negated), "negated view"),
        (lambda: hvd.broadcast_(torch.ones(3, 4).t(), 0), "broadcast_: the tensor is not contig"),
        (lambda: hvd.broadcast(x, hvd.size()), f"expected a rank from 0 to {hvd.size() - 1}"),
        (lambda: hvd.broadcast(x, -1), "root_rank=-1, expected a rank from 0"),
        (lambda: hvd.broadcast(x, "0"), "root_rank='0'"),
        (lambda: hvd.broadcast(x, None), "root_rank=None"),
        (lambda: hvd.broadcast_(x, False), "root_rank=False"),
        (lambda: hvd.broadcast_(x, 0.0), "root_rank=0.0"),
        (lambda: hvd.allgather(torch.tensor(1.0)), "allgather: a scalar has no first dimension"),
        (lambda: hvd.allgather(3), "allgather: expected a torch.Tensor, got int"),
        (lambda: hvd.barrier(3), "barrier: process_set=3"),
        (lambda: hvd.barrier(name=3), "name=3"),
        (lambda: hvd.synchronize(3), "expected a handle that an asynchronous operation returned"),
        (lambda: hvd.poll(None), "expected a handle .* got NoneType"),
    )


def calls_with_bad_factors():
    """Of every form that takes factors, as `calls`."""
    x, frozen = torch.ones(3, requires_grad=True), torch.ones(3)
    wholes = hvd.allreduce, hvd.reducescatter, hvd.allreduce_async, hvd.reducescatter_async
    in_place = hvd.allreduce_, hvd.allreduce_async_
    groups = hvd.grouped_allreduce, hvd.grouped_reducescatter, hvd.grouped_allreduce_async
    groups += hvd.grouped_allreduce_, hvd.grouped_allreduce_async_, hvd.grouped_reducescatter_async
    for given, text in (
        (10**400, "or postscale_factor is too large for a float64; expected at most 1.8e.308"),
        (Fraction(10**400), "too large for a float64"),
        ("2", "='2'.*: expected two numbers"),
        (b"2", "=b'2'.*: expected two numbers"),
        (2j, "=2j.*: expected two numbers"),
        ([2.0], r"=\[2.0\].*: expected two numbers"),
        (torch.ones(2), r"=tensor\(\[1., 1.\]\).*: expected two numbers"),
    ):
        for which in ("prescale_factor", "postscale_factor"):
            kind = {which: given, "name": "bad factor"}
            for form in wholes:
                yield functools.partial(form, x, **kind), text
            for form in in_place:
                yield functools.partial(form, frozen, **kind), text
            for form in groups:
                yield functools.partial(form, [frozen, torch.ones(30_000)], **kind), text


def bad_arguments():
    hvd.init()
    for call, text in (*calls(), *calls_with_bad_factors()):
        with pytest.raises(ValueError, match=text):
            call()
    # No number was taken by any of them, also where only one rank made it.
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match="expected a torch"):
            hvd.allreduce(3)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum) == hvd.size()


@pytest.mark.ranks(1, 2)
def test_a_bad_argument_is_a_value_error_at_the_call(world):
    world.run(bad_arguments)


def unsupported():
    hvd.init()
    x, flags = torch.ones(3), torch.ones(3, dtype=torch.bool)
    calls = [
        functools.partial(call, op)
        for op in (hvd.Adasum, hvd.Min, hvd.Max, hvd.Product)
        for call in (
            lambda op: hvd.reducescatter(x, op=op),
            lambda op: hvd.reducescatter_async(x, op=op),
            lambda op: hvd.grouped_reducescatter([x], op=op),
            lambda op: hvd.sparse_allreduce_async(sparse(x), "s", op),
        )
    ]
    calls += [
        lambda: hvd.allreduce(flags),
        lambda: hvd.grouped_allreduce_([flags], op=hvd.Adasum),
        lambda: hvd.reducescatter(torch.tensor(1.0)),
        lambda: hvd.allgather(torch.tensor(1.0)),
        lambda: hvd.alltoall(torch.tensor(1.0)),
    ]
    for number, call in enumerate(calls):
        with pytest.raises(
            ValueError, match=r"expected Average or Sum|bool has no|scalar"
        ) as caught:
            call()
        assert isinstance(caught.value, hvd.HorovodInternalError), number
    with pytest.raises(ValueError, match="op=17, expected Average or Sum") as caught:
        hvd.reducescatter(x, op=17)
    assert not isinstance(caught.value, hvd.HorovodInternalError)


@pytest.mark.ranks(1)
@pytest.mark.mpis("openmpi")
def test_what_an_operation_does_not_have_is_horovods_error_too(world):
    world.run(unsupported)


def names_again():
    """Each as soon as this rank sees that the one before has ended; the others may be behind."""
    hvd.init()
    totals = []
    for i in range(50):
        handle = hvd.allreduce_async(torch.tensor([i + hvd.rank()]), name="again", op=hvd.Sum)
        while not hvd.poll(handle):
            pass
        again = hvd.allreduce_async(torch.tensor([-1]), name="again", op=hvd.Sum)
        totals += [hvd.synchronize(handle).item(), hvd.synchronize(again).item()]
    return totals


@pytest.mark.ranks(2)
@pytest.mark.mpis("openmpi")
def test_a_name_is_free_again_as_soon_as_its_operation_has_ended(world):
    expected = [total for i in range(50) for total in (2 * i + 1, -2)]
    assert world.run(names_again) == [expected] * 2


def good_arguments():
    hvd.init()
    size = hvd.size()
    x = torch.full((3,), hvd.rank() + 1.0)
    for last in (size - 1, np.int64(size - 1), np.uint8(size - 1), torch.tensor(size - 1)):
        assert hvd.broadcast(x, last).eq(size).all()
    for half in (0.5, np.float32(0.5), torch.tensor(0.5)):
        total = hvd.allreduce(x, op=hvd.Sum, prescale_factor=half, postscale_factor=4)
        assert total.eq(size * (size + 1)).all()
    # A compressor of the user's own, as Horovod's are.
    doubled = type(
        "Doubled",
        (),
        {
            "compress": staticmethod(lambda tensor: (tensor * 2, None)),
            "decompress": staticmethod(lambda tensor, ctx: tensor + 1),
        },
    )
    assert hvd.allreduce(x, op=hvd.Max, compression=doubled).eq(2 * size + 1).all()
    # Any number is one, as in torch's `factor * tensor`.
    for factor in (True, Fraction(1, 3), Decimal("0.1"), 2**80, float("inf"), float("nan"), -0.0):
        got = hvd.allreduce(x, op=hvd.Max, postscale_factor=factor)
        wanted = float(factor) * torch.full((3,), float(size))
        assert torch.equal(got.nan_to_num(0.25), wanted.nan_to_num(0.25)), factor
    # Integers: multiplied in double, and the result is truncated.
    assert hvd.allreduce(torch.tensor([7]), op=hvd.Max, postscale_factor=0.5).item() == 3
    in_order = (None, "name", hvd.Compression.none, hvd.Sum, 2.0, 0.5, hvd.global_process_set)
    assert hvd.allreduce(x, *in_order).eq(size * (size + 1) / 2).all()
    hvd.barrier(hvd.global_process_set, "named")


@pytest.mark.ranks(2)
@pytest.mark.mpis("openmpi")
def test_what_can_be_taken_for_an_integer_or_a_number_is_one(world):
    world.run(good_arguments)


def unsendable():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()

    class Refuses:
        def __reduce__(self):
            raise TypeError("not this one")

    mine = Refuses() if rank == size - 1 else rank
    texts = []
    for call in (
        lambda: hvd.allgather_object(mine),
        lambda: hvd.broadcast_object(mine, size - 1),
        lambda: hvd.broadcast_object(mine, size - 1, name="named"),
    ):
        with pytest.raises((TypeError, hvd.HorovodInternalError)) as caught:
            call()
        texts.append((type(caught.value).__name__, str(caught.value)))
        assert hvd.allgather_object(rank) == list(range(size))
    return texts


@pytest.mark.ranks(2)
@pytest.mark.hosts("1,1")
def test_an_object_that_cannot_be_pickled_is_an_error_on_every_rank(world):
    others, last = world.run(unsendable)
    assert last == [("TypeError", "not this one")] * 3
    for kind, text in others:
        assert kind == "HorovodInternalError"
        assert "rank 1's object can't be sent: TypeError: not this one" in text


def post_huge_shapes():
    hvd.init()
    post = worlds.current().team.engine.post
    x = torch.ones(1)

    def start(kind, shape):
        tensor = SimpleNamespace(shape=shape, data_ptr=x.data_ptr)
        return post(_core.posting(kind, "huge", False, _core.FLOAT32, tensor, None, _core.SUM))

    with pytest.raises(ValueError, match=r"2\^63 elements or more"):
        start(_core.ALLREDUCE, (2**32, 2**32))
    with pytest.raises(ValueError, match=r"2\^63 elements or more"):
        start(_core.ALLGATHER, (1, 2**32, 2**32))
    for kind, shape in (
        (_core.ALLREDUCE, (2**32, 2**32, 0)),
        (_core.ALLREDUCE, (0, 2**32, 2**32)),
        (_core.ALLGATHER, (0, 2**32, 2**32)),
    ):
        assert start(kind, shape).wait() is None


@pytest.mark.ranks(1, 2)
def test_the_number_of_elements_does_not_overflow(world):
    world.run(post_huge_shapes)
