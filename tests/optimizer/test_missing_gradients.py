"""Parameters that get no gradient: on some ranks, on all, for a while."""

import functools

import pytest
import torch
from torch import nn

import hvdlite as hvd
from tests.harness.on_ranks import on_ranks
from tests.optimizer.models import Twins, batches, mean_over_ranks, model, sgd

pytestmark = [pytest.mark.ranks(2), pytest.mark.mpis("mpich")]


@on_ranks(2, 3)
def test_a_missing_gradient_counts_as_zeros_unless_no_rank_has_one():
    rank = hvd.rank()
    used, first_only, never = (nn.Parameter(torch.zeros(3)) for _ in range(3))
    optimizer = sgd([used, first_only, never])
    for to_none in (True, False, True):
        loss = used.sum() * (rank + 1)
        if rank == 0:
            loss = loss + first_only.sum() * 4
        loss.backward()
        assert used.grad.tolist() == [mean_over_ranks(lambda r: r + 1)] * 3
        assert first_only.grad.tolist() == pytest.approx([4 / hvd.size()] * 3)
        assert never.grad is None
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
        assert (used.grad is None) == to_none
        assert never.grad is None
    kept = torch.full((3,), 7.0)
    never.grad = kept
    used.sum().backward()
    assert never.grad is kept
    assert kept.tolist() == [7.0] * 3
    optimizer.step()


@on_ranks()
def test_a_gradient_that_no_rank_renews_stays_as_it_was():
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = sgd([a, b])
    (a.sum() + 3 * b.sum()).backward()
    optimizer.step()
    # Nobody zeroes b: its .grad, a place in the bucket, must survive a round without it.
    a.grad = None
    a.sum().backward()
    assert b.grad.tolist() == [3.0, 3.0]
    assert a.grad.tolist() == [1.0, 1.0]
    optimizer.step()


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("how", ["no backward", "one that reaches nothing"])
@on_ranks(2, 3)
def test_a_rank_whose_backward_reaches_no_parameter_takes_part_in_step(how, sparse):
    p = nn.Parameter(torch.zeros(3, 2))
    other = torch.zeros(3, 2, requires_grad=True)
    optimizer = sgd([p])
    for _ in range(3):
        optimizer.zero_grad()
        of = p if hvd.rank() == 0 else other
        if of is p or how != "no backward":
            rows = nn.functional.embedding(torch.tensor([1, 1, 2]), of, sparse=sparse)
            (rows * 6).sum().backward()
        optimizer.step()
    wanted = torch.tensor([[0.0, 0.0], [12.0, 12.0], [6.0, 6.0]])
    torch.testing.assert_close(p.detach(), -3 * wanted / hvd.size())


@on_ranks(2, 3)
def test_parameters_may_be_frozen_and_thawed_between_steps():
    nets = model(), model()

    def freeze(which, frozen):
        for net in nets:
            net[which].requires_grad_(not frozen)

    freeze(0, True)
    twins = Twins(functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), nets)
    for step, (x, y) in enumerate(batches(16, 2, hvd.size())):
        if step == 4:
            freeze(0, False)
        if step == 8:
            freeze(2, True)
        if step % 4 != 2:
            twins.zero_grad()
        else:
            for net in nets:
                net.zero_grad()
        if step == 12:
            freeze(2, False)
        twins.backward(x, y)
        twins.step()
