"""Buckets follow the order in which backward computes the gradients in the first round."""

import pytest
import torch
from torch import nn

import hvdlite as hvd
from tests.optimizer.models import mean_over_ranks

pytestmark = [pytest.mark.ranks(2), pytest.mark.hosts("1,1")]

COUNT = 6
ALONE = {"HVDLITE_BUCKET_BYTES": "0"}
PAIRS = {"HVDLITE_BUCKET_BYTES": "16", "HVDLITE_FIRST_BUCKET_BYTES": "16"}


def parameters():
    """Of two elements each."""
    return [nn.Parameter(torch.zeros(2)) for _ in range(COUNT)]


def optimizer_of(params, **options):
    names = [(str(index), param) for index, param in enumerate(params)]
    return hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), names, **options)


def backward_in(order, params, factor=1.0):
    """Backward reaches the parameters in this order. The i-th gradient is (rank + 1) · (i + 1)."""
    total = torch.zeros(2)
    for index in reversed(order):
        total = total + params[index] * ((hvd.rank() + 1) * (index + 1) * factor)
    total.sum().backward()


def wrong_gradients(params, order, factor=1.0):
    """Those that are not what they should be, where all ranks have had these."""
    mean = mean_over_ranks(lambda rank: rank + 1)
    return [
        (index, None if params[index].grad is None else params[index].grad.tolist())
        for index in order
        if params[index].grad is None
        or params[index].grad.tolist() != [mean * (index + 1) * factor] * 2
    ]


def buckets_of(optimizer):
    return [
        [int(slot.name) for slot in bucket.slots]
        for bucket in optimizer._hvdlite_reducer.gradients.buckets
    ]


def outside(optimizer, params):
    """The parameters whose `.grad` does not lie in the bucket that is reduced."""
    memory = {
        slot.name: bucket.flat.untyped_storage().data_ptr()
        for bucket in optimizer._hvdlite_reducer.gradients.buckets
        for slot in bucket.slots
    }
    return [
        index
        for index, param in enumerate(params)
        if param.grad is not None and param.grad.untyped_storage().data_ptr() != memory[str(index)]
    ]


ORDER = [2, 0, 5, 1, 4, 3]


def becomes_that_of_rank_0(options):
    """The other ranks have another one; and some are last, as no backward comes to them."""
    hvd.init()
    params = parameters()
    optimizer = optimizer_of(params, **options)
    before = buckets_of(optimizer)
    used = ORDER[:-1]
    order = used if hvd.rank() == 0 else used[::-1]
    problems, found = [], []
    for to_none in (True, False, True):
        backward_in(order, params)
        found.append(buckets_of(optimizer))
        problems += wrong_gradients(params, used) + outside(optimizer, params)
        assert params[ORDER[-1]].grad is None
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    assert not problems
    return before, found


@pytest.mark.ranks(2, 3)
@pytest.mark.hosts("2,1")
@pytest.mark.parametrize(
    ("knobs", "options", "wanted"),
    [
        (ALONE, {}, [[i] for i in ORDER]),
        (PAIRS, {}, [ORDER[:2], ORDER[2:4], ORDER[4:]]),
        # In a group the order says when it starts.
        (ALONE, {"groups": 2}, [[2, 0, 1], [5, 4, 3]]),
    ],
    ids=["alone", "pairs", "groups"],
)
def test_buckets_follow_backward_after_the_first_round(world, knobs, options, wanted):
    before, found = world.run(becomes_that_of_rank_0, options, knobs=knobs)[0]
    assert [index for bucket in before for index in bucket] != [i for b in wanted for i in b]
    assert found == [wanted] * 3
    assert world.run(becomes_that_of_rank_0, options, knobs=knobs) == [(before, found)] * world.size


def expected_order():
    hvd.init()
    params = parameters()
    optimizer = optimizer_of(params)
    gradients = optimizer._hvdlite_reducer.gradients
    for _ in range(3):
        before = gradients.buckets
        backward_in(list(reversed(range(COUNT))), params)
        assert gradients.buckets is before
        optimizer.step()
        optimizer.zero_grad()


def test_buckets_that_stand_in_the_right_order_are_not_made_anew(world):
    world.run(expected_order, knobs=ALONE)


def joins_after_the_first_round():
    """Where not all take part in a round it changes nothing; where they did, all have changed."""
    hvd.init()
    last = hvd.size() - 1
    params = parameters()
    optimizer = optimizer_of(params, op=hvd.Sum)
    before = buckets_of(optimizer)

    def step(ranks):
        optimizer.zero_grad()
        backward_in(ORDER, params)
        total = sum(rank + 1 for rank in ranks)
        for index, param in enumerate(params):
            assert param.grad.tolist() == [(index + 1.0) * total] * 2

    if hvd.rank() == 0:
        step([0])
        assert buckets_of(optimizer) == before
    hvd.join()
    step(range(hvd.size()))
    assert buckets_of(optimizer) == [[index] for index in ORDER]
    if hvd.rank() == last:
        for _ in range(2):
            step([last])
    hvd.join()
    step(range(hvd.size()))


@pytest.mark.ranks(2, 3)
def test_a_rank_may_join_before_and_after_the_round_that_shows_the_order(world):
    world.run(joins_after_the_first_round, knobs=ALONE)


def keeps_what_the_round_made():
    """A hook of the user's sees each gradient when it is in its former place, and keeps it."""
    hvd.init()
    params = parameters()
    optimizer = optimizer_of(params, op=hvd.Sum)
    kept = []
    for param in params:
        param.register_post_accumulate_grad_hook(lambda param: kept.append(param.grad))
    backward_in(ORDER, params)
    total = sum(rank + 1 for rank in range(hvd.size()))
    values = [[(index + 1.0) * total] * 2 for index in ORDER]
    assert [grad.tolist() for grad in kept] == values
    optimizer.step()
    optimizer.zero_grad()
    backward_in(ORDER, params, factor=10.0)
    assert [grad.tolist() for grad in kept[:COUNT]] == values
    assert not outside(optimizer, params)


def accumulates():
    hvd.init()
    params = parameters()
    optimizer = optimizer_of(params, backward_passes_per_step=2)
    for step in range(3):
        backward_in(ORDER, params, factor=2.0)
        backward_in(ORDER, params, factor=1.0)
        assert buckets_of(optimizer) == [[index] for index in ORDER]
        assert not wrong_gradients(params, ORDER, factor=3.0)
        assert not outside(optimizer, params)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 1)


def clips_and_scales():
    hvd.init()
    params = parameters()
    optimizer = optimizer_of(params)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        optimizer.zero_grad(set_to_none=step != 2)
        backward_in(ORDER, params, factor=scaler.scale(torch.ones(())).item())
        scaler.unscale_(optimizer)
        assert not wrong_gradients(params, ORDER)
        before = [param.detach().clone() for param in params]
        nn.utils.clip_grad_norm_(params, 1.0)
        assert not outside(optimizer, params)
        scaler.step(optimizer)
        scaler.update()
        moved = torch.stack([(a - b).detach() for a, b in zip(before, params, strict=True)])
        assert moved.norm().item() == pytest.approx(1.0, rel=1e-4)


def replaces_gradients():
    """Tensors of the user's, of autograd's, and none: each gets its place in the next round."""
    hvd.init()
    params = parameters()
    optimizer = optimizer_of(params)
    for step in range(4):
        backward_in(ORDER, params)
        assert not wrong_gradients(params, ORDER)
        assert not outside(optimizer, params)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for param in params[::2]:
            param.grad = torch.zeros(2)
        params[1].grad = None


def learns_of_rows():
    """The same round shows that a gradient is sparse."""
    hvd.init()
    table, *params = parameters()
    rows = nn.Parameter(torch.zeros(4, 2))
    optimizer = optimizer_of([*params, rows, table], op=hvd.Sum)
    for _ in range(3):
        optimizer.zero_grad()
        looked_up = nn.functional.embedding(torch.tensor([hvd.rank()]), rows, sparse=True)
        # The rows come first, and stand behind the table at the beginning.
        (table.sum() + looked_up.sum()).backward()
        assert table.grad.tolist() == [hvd.size()] * 2
        wanted = torch.zeros(4, 2)
        wanted[: hvd.size()] = 1
        assert rows.grad.is_sparse
        assert torch.equal(rows.grad.to_dense(), wanted)


def thaws():
    """A parameter that needs a gradient only later is last, until a round shows its place."""
    hvd.init()
    params = parameters()
    params[5].requires_grad_(False)
    optimizer = optimizer_of(params)
    early = [index for index in ORDER if index != 5]
    found = []
    for order in (early, early, ORDER, ORDER):
        params[5].requires_grad_(order is ORDER)
        backward_in(order, params)
        assert not wrong_gradients(params, order)
        assert not outside(optimizer, params)
        found.append([index for bucket in buckets_of(optimizer) for index in bucket])
        optimizer.step()
        optimizer.zero_grad()
    assert found == [early, early, ORDER, ORDER]


@pytest.mark.parametrize(
    "case",
    [
        keeps_what_the_round_made,
        accumulates,
        clips_and_scales,
        replaces_gradients,
        learns_of_rows,
        thaws,
    ],
    ids=lambda case: case.__name__,
)
def test_gradients_lie_in_the_new_buckets_with_their_values(world, case):
    world.run(case, knobs=ALONE)
