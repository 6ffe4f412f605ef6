"""Tensors whose memory is not there, or not all of it: a ValueError before anything is posted."""

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import hvdlite as hvd

COUNT = 20_000  # as large as a group's part that travels alone


def resized(size_bytes, begin=0, view=lambda tensor: tensor):
    tensor = torch.ones(begin + COUNT)
    view = view(tensor[begin:])
    tensor.untyped_storage().resize_(size_bytes)
    return view


def fake():
    with FakeTensorMode():
        return torch.ones(COUNT)


def mapped():
    seen = []
    torch.vmap(lambda row: (seen.append(row), row)[1])(torch.ones(1, COUNT))
    return seen[0]


def nested():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it a prototype
        return torch.nested.nested_tensor([torch.ones(2)])


def quantized():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(COUNT), 0.1, 0, torch.quint8)


class Wrapper(torch.Tensor):
    """Stands for another tensor, and has no memory of its own."""

    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (COUNT,))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(function)


GONE = "was freed or shrunk; first resize the storage"
STANDS_FOR = "has no memory to send: it only stands for a tensor"
BAD = {
    "freed": (lambda: resized(0), GONE),
    "freed, of a later begin": (lambda: resized(0, 50_000), GONE),
    "freed, not contiguous": (lambda: resized(0, view=lambda t: t.view(2, -1).t()), GONE),
    "freed, negated": (lambda: resized(0, view=torch._neg_view), GONE),
    "shrunk": (lambda: resized(4 * COUNT - 4), GONE),
    "shrunk, of a later begin": (lambda: resized(4 * COUNT, 1), GONE),
    "meta": (lambda: torch.ones(COUNT, device="meta"), STANDS_FOR),
    "fake": (fake, "a FakeTensor on cpu " + STANDS_FOR),
    "functional": (lambda: torch._to_functional_tensor(torch.ones(COUNT)), STANDS_FOR),
    "zeros without memory": (lambda: torch._efficientzerotensor(COUNT), STANDS_FOR),
    "of vmap": (mapped, STANDS_FOR),
    "a wrapper": (Wrapper, "a Wrapper on cpu " + STANDS_FOR),
    "lazy": (torch.nn.UninitializedParameter, STANDS_FOR),
    "nested": (nested, "a nested tensor; expected"),
    "quantized": (quantized, "quint8 is not supported"),
}
SINGLE = {
    "allreduce": lambda t: hvd.allreduce(t, name="x", op=hvd.Sum),
    "allreduce_": lambda t: hvd.allreduce_(t, name="x", op=hvd.Sum),
    "compressed": lambda t: hvd.allreduce(t, name="x", compression=hvd.Compression.fp16),
    "allgather": lambda t: hvd.allgather(t, "x"),
    "broadcast": lambda t: hvd.broadcast(t, 0, "x"),
    "broadcast_": lambda t: hvd.broadcast_(t, 0, "x"),
    "alltoall": lambda t: hvd.alltoall(t, name="x"),
    "reducescatter": lambda t: hvd.reducescatter(t, "x"),
}
# The bad one is the last part of a group whose others travel by themselves.
GROUPED = {
    "allreduce": lambda ts: hvd.grouped_allreduce(ts, name="x", op=hvd.Sum),
    "allreduce_": lambda ts: hvd.grouped_allreduce_(ts, name="x", op=hvd.Sum),
    "Adasum": lambda ts: hvd.grouped_allreduce(ts, name="x", op=hvd.Adasum),
    "allgather": lambda ts: hvd.grouped_allgather(ts, "x"),
    "reducescatter": lambda ts: hvd.grouped_reducescatter(ts, "x"),
}


def refused():
    """Rank 1 passes bad arguments; they must leave no trace when both ranks pass good ones."""
    hvd.init()
    wrong = []

    def check(what, call, text):
        try:
            call()
            wrong.append((what, "is taken"))
        except ValueError as error:
            if text not in str(error):
                wrong.append((what, str(error)))

    for kind, (make, text) in BAD.items():
        for form, call in SINGLE.items():
            if hvd.rank() == 1:
                check((kind, form), lambda make=make, call=call: call(make()), text)
        for form, call in GROUPED.items():
            if hvd.rank() == 1:
                group = [torch.ones(COUNT + 2), torch.ones(2), make()]
                check((kind, "grouped", form), lambda call=call, group=group: call(group), text)
    good = torch.full((COUNT,), hvd.rank() + 1.0)
    for call in SINGLE.values():
        call(good.clone())
    for form, call in GROUPED.items():
        results = call([torch.ones(COUNT + 2), torch.ones(2), good.clone()])
        if form.startswith("allreduce") and not results[-1].eq(3).all():
            wrong.append((form, "differs"))
    return wrong


@pytest.mark.ranks(2)
@pytest.mark.mpis("openmpi")
def test_a_tensor_without_its_memory_is_refused_before_any_part_is_posted(world):
    assert world.run(refused) == [[], []]


def others():
    hvd.init()
    splits = torch.ones(1, dtype=torch.int32)
    splits.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"alltoall: splits: int32\[1\] has no memory"):
        hvd.alltoall(torch.ones(1), splits)
    for emptied in ("_indices", "_values"):
        sparse = torch.eye(3).to_sparse().coalesce()
        getattr(sparse, emptied)().untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=r"sparse_allreduce_async: \w+\[.*\] has no memory"):
            hvd.sparse_allreduce_async(sparse, "x", hvd.Sum)
    assert hvd.sparse_allreduce_async(torch.eye(3).to_sparse(), "x", hvd.Sum)()._nnz() == 3


@pytest.mark.ranks(1)
@pytest.mark.mpis("openmpi")
def test_what_comes_beside_the_tensor_needs_its_memory_too(world):
    world.run(others)
