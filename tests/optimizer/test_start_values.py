"""Ranks that start from different parameters get one warning, before the first step."""

import warnings

import pytest
import torch
from torch import nn

import hvdlite as hvd
from hvdlite.optimizer.checks.start_values import hash_of, hash_on_device, start_difference
from tests.optimizer.models import model

pytestmark = [pytest.mark.ranks(2), pytest.mark.mpis("mpich")]


def starts(how, op, options):
    """The last rank's third and fifth parameter differ. What each rank is told, in three steps."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    net = model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), op=op, **options
    )
    if rank == size - 1 and how != "alike":
        # In one bit each, and after the optimizer has been made.
        with torch.no_grad():
            net[2].weight.view(torch.int64)[1, 2] ^= 1
            net[4].weight.neg_()
    if how == "broadcast":
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    texts = []
    before = [p.detach().clone() for p in net.parameters()]
    for step in range(3):
        optimizer.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                net(torch.full((1, 6), rank + 1.0, dtype=torch.float64)).sum().backward()
                optimizer.step()
            except hvd.HorovodInternalError as error:
                texts.append((step, "error", str(error)))
                assert all(map(torch.equal, before, net.parameters())), "no step was made"
        texts += [(step, "warning", str(each.message)) for each in caught]
    return texts


TEXT = (
    "DistributedOptimizer: the ranks start from different values: 2 of 6 parameters differ, first "
    "'2.weight', between {others}; rank {last}; call broadcast_parameters(model.state_dict(), "
    "root_rank=0) on every rank before the first step, or pass check_start=False to "
    "DistributedOptimizer if this is intended"
)


def text_in(world):
    others = "rank 0" if world.size == 2 else "ranks " + ", ".join(map(str, range(world.size - 1)))
    return TEXT.format(others=others, last=world.size - 1)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_different_values_are_one_warning_that_names_the_first_parameter(world, op):
    first, *others = world.run(starts, "different", op, {})
    assert first == [(0, "warning", text_in(world))]
    assert others == [[]] * (world.size - 1)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_different_values_are_an_error_on_every_rank_where_strict(world, op):
    told = world.run(starts, "different", op, {}, knobs={"HVDLITE_STRICT": "1"})
    assert told == [[(0, "error", text_in(world))]] * world.size


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
@pytest.mark.parametrize(
    ("how", "options"),
    [("alike", {}), ("broadcast", {}), ("different", {"check_start": False})],
)
def test_nothing_is_said_of_values_that_are_alike_or_not_compared(world, how, options, op):
    assert world.run(starts, how, op, options) == [[]] * world.size


def only_here():
    hvd.init()
    p = nn.Parameter(torch.full((1,), float(hvd.rank())))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), check_start=hvd.rank() > 0)
    p.sum().backward()
    optimizer.step()
    assert p.item() == hvd.rank() - 1


def test_values_are_compared_where_all_ranks_want_it(world):
    world.run(only_here)


def test_the_text_groups_the_ranks_by_what_they_have():
    found = [[("a", 1), ("b", value)] for value in (5, 6, 5, 7, 8, 9)]
    text = start_difference(found, [0, 2, 4, 6, 8, 10])
    assert (
        "1 of 2 parameters differ, first 'b', between ranks 0, 4; rank 2; rank 6; rank 8; …" in text
    )


def as_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize(
    "hash_bytes", [lambda t: hash_of(t), lambda t: hash_on_device(as_bytes(t))]
)
@pytest.mark.parametrize("count", [1, 7, (1 << 16) + 3, (1 << 22) + 5])
def test_a_hash_depends_on_every_bit_and_place(hash_bytes, count):
    generator = torch.Generator().manual_seed(count)
    values = torch.randn(count, generator=generator)
    others = [-values, torch.zeros(count), -torch.zeros(count)]
    for place in {0, count // 2, count - 1}:
        changed = values.clone()
        changed.view(torch.int32)[place] ^= 1
        others.append(changed)
    if count > 1:
        swapped = values.clone()
        swapped[[0, -1]] = values[[-1, 0]]
        others += [swapped, values.flip(0).neg()]
    assert len({hash_bytes(each) for each in (values, *others)}) == len(others) + 1
    assert hash_bytes(values) == hash_bytes(values.clone())


@pytest.mark.parametrize(
    "hash_bytes", [lambda t: hash_of(t), lambda t: hash_on_device(as_bytes(t))]
)
def test_there_is_a_hash_of_every_dtype_and_shape(hash_bytes):
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.bool):
        for shape in ((), (3,), (2, 3), (2, 0)):
            ones = torch.ones(shape, dtype=dtype)
            assert hash_bytes(ones) == hash_bytes(ones.clone())
            assert hash_bytes(ones) != hash_bytes(torch.zeros_like(ones)) or not ones.numel()


def test_the_hash_is_of_the_values_and_not_of_how_they_lie():
    values = torch.randn(3, 5)
    assert hash_of(values.t().contiguous().t()) == hash_of(values)
    numbers = torch.randn(4, dtype=torch.complex64)
    assert hash_of(numbers.conj()) == hash_of(numbers.conj().resolve_conj()) != hash_of(numbers)
    nan = torch.tensor([torch.nan])
    assert hash_of(nan) == hash_of(nan.clone())


def test_what_has_no_values_to_read_is_left_out():
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(4)
    unreadable = [torch.ones(4, device="meta"), torch.ones(4, 4).to_sparse(), freed, fake]
    assert [hash_of(each) for each in unreadable] == [0] * 4
