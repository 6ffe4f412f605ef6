"""Buckets follow the order in which backward computes the gradients in the first round."""

import pytest
import torch
from torch import nn

import hvdlite as hvd
from tests.harness.on_ranks import on_ranks
from tests.optimizer.models import ONE_BY_ONE, mean_over_ranks, same_on_all_ranks, sgd

pytestmark = [pytest.mark.ranks(2), pytest.mark.hosts("1,1")]

COUNT = 6
ORDER = [2, 0, 5, 1, 4, 3]
PAIRS = {"HVDLITE_BUCKET_BYTES": "16", "HVDLITE_FIRST_BUCKET_BYTES": "16"}


def parameters_and_optimizer(**options):
    """Parameters of two elements each."""
    params = [nn.Parameter(torch.zeros(2)) for _ in range(COUNT)]
    return params, sgd(params, names=[(str(i), p) for i, p in enumerate(params)], **options)


def backward_in(order, params, factor=1.0):
    """Backward reaches the parameters in this order. The i-th gradient is (rank + 1) · (i + 1)."""
    total = torch.zeros(2)
    for index in reversed(order):
        total = total + params[index] * ((hvd.rank() + 1) * (index + 1) * factor)
    total.sum().backward()


def buckets_of(optimizer):
    buckets = optimizer._hvdlite_reducer.gradients.buckets
    return [[int(slot.name) for slot in bucket.slots] for bucket in buckets]


def flat(buckets):
    return [index for bucket in buckets for index in bucket]


def check(optimizer, params, having, total=None, factor=1.0):
    """These have the mean of the ranks' gradients, or this multiple of their own, others none; and
    each lies in the bucket that is reduced."""
    total = mean_over_ranks(lambda rank: rank + 1) if total is None else total
    for bucket in optimizer._hvdlite_reducer.gradients.buckets:
        memory = bucket.flat.untyped_storage().data_ptr()
        for index in (int(slot.name) for slot in bucket.slots):
            grad = params[index].grad
            if index in having:
                assert grad.tolist() == [total * (index + 1) * factor] * 2
                assert grad.untyped_storage().data_ptr() == memory
            else:
                assert grad is None


@pytest.mark.parametrize(
    ("knobs", "options", "wanted"),
    [
        (ONE_BY_ONE, {}, [[i] for i in ORDER]),
        (ONE_BY_ONE, {"backward_passes_per_step": 2}, [[i] for i in ORDER]),
        (PAIRS, {}, [ORDER[:2], ORDER[2:4], ORDER[4:]]),
        # In a group the order says when it starts.
        (ONE_BY_ONE, {"groups": 2}, [[2, 0, 1], [5, 4, 3]]),
    ],
)
@on_ranks(2, 3, hosts=("2,1",))
def test_buckets_follow_backward_on_rank_0_after_the_first_round(knobs, options, wanted):
    """The other ranks have another order; and some are last, as no backward comes to them."""
    params, optimizer = parameters_and_optimizer(**options)
    before = same_on_all_ranks(buckets_of(optimizer))
    used, passes = ORDER[:-1], options.get("backward_passes_per_step", 1)
    order = used if hvd.rank() == 0 else used[::-1]
    assert flat(before) != flat(wanted)
    for to_none in (True, False, True):
        for _ in range(passes):
            backward_in(order, params, 1 / passes)
        assert buckets_of(optimizer) == wanted
        check(optimizer, params, used)
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)


@on_ranks(knobs=ONE_BY_ONE)
def test_buckets_that_stand_in_the_right_order_are_not_made_anew():
    params, optimizer = parameters_and_optimizer()
    gradients = optimizer._hvdlite_reducer.gradients
    for _ in range(3):
        before = gradients.buckets
        backward_in(list(reversed(range(COUNT))), params)
        assert gradients.buckets is before
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2, 3, knobs=ONE_BY_ONE)
def test_a_rank_may_join_before_and_after_the_round_that_shows_the_order():
    """Where not all take part in a round it changes nothing; where they did, all have changed."""
    everyone, last = range(hvd.size()), hvd.size() - 1
    params, optimizer = parameters_and_optimizer(op=hvd.Sum)
    before = buckets_of(optimizer)

    def step(ranks):
        optimizer.zero_grad()
        backward_in(ORDER, params)
        check(optimizer, params, ORDER, total=sum(rank + 1 for rank in ranks))

    if hvd.rank() == 0:
        step([0])
        assert buckets_of(optimizer) == before
    hvd.join()
    step(everyone)
    assert buckets_of(optimizer) == [[index] for index in ORDER]
    if hvd.rank() == last:
        for _ in range(2):
            step([last])
    hvd.join()
    step(everyone)


@on_ranks(knobs=ONE_BY_ONE)
def test_a_hook_sees_each_gradient_in_its_former_place_and_may_keep_it():
    params, optimizer = parameters_and_optimizer(op=hvd.Sum)
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
    check(optimizer, params, ORDER, total, factor=10.0)


@on_ranks(knobs=ONE_BY_ONE)
def test_a_tensor_that_the_script_puts_there_gets_its_place_in_the_next_round():
    """Tensors of the user's, of autograd's, and none."""
    params, optimizer = parameters_and_optimizer()
    for step in range(4):
        backward_in(ORDER, params)
        check(optimizer, params, ORDER)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for param in params[::2]:
            param.grad = torch.zeros(2)
        params[1].grad = None


@on_ranks(knobs=ONE_BY_ONE)
def test_the_round_that_shows_the_order_may_show_that_a_gradient_is_sparse():
    table, rows = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(4, 2))
    optimizer = sgd([nn.Parameter(torch.zeros(2)), rows, table], op=hvd.Sum)
    for _ in range(3):
        optimizer.zero_grad()
        looked_up = nn.functional.embedding(torch.tensor([hvd.rank()]), rows, sparse=True)
        # The rows come first, and stand behind the table at the beginning.
        (table.sum() + looked_up.sum()).backward()
        assert table.grad.tolist() == [hvd.size()] * 2
        assert rows.grad.is_sparse
        assert rows.grad.to_dense().sum(1).tolist() == [2.0] * hvd.size() + [0.0] * (4 - hvd.size())


@on_ranks(knobs=ONE_BY_ONE)
def test_a_parameter_that_needs_a_gradient_later_is_last_until_a_round_shows_its_place():
    params = [nn.Parameter(torch.zeros(2)) for _ in range(COUNT)]
    params[5].requires_grad_(False)
    optimizer = sgd(params, names=[(str(i), p) for i, p in enumerate(params)])
    early = [index for index in ORDER if index != 5]
    for order in (early, early, ORDER, ORDER):
        params[5].requires_grad_(order is ORDER)
        backward_in(order, params)
        check(optimizer, params, order)
        assert flat(buckets_of(optimizer)) == order
        optimizer.step()
        optimizer.zero_grad()
