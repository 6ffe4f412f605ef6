"""What step does: closures, and synchronize before it."""

import pytest
import torch
from torch import nn

import hvdlite as hvd
from tests.training.models import (
    assert_same_parameters,
    batches,
    loss_of,
    mean_over_ranks,
    model,
    own,
)

pytestmark = [pytest.mark.ranks(2), pytest.mark.mpis("mpich")]


def steps_with_a_closure():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    alone, net = model(), model()
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    for x, y in batches(5, 2, size):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = loss_of(net, own(x, rank, size), own(y, rank, size))
            loss.backward()
            return loss

        reference.zero_grad()
        loss_of(alone, x, y).backward()
        reference.step()
        assert optimizer.step(closure).ndim == 0
        optimizer.step(closure=closure)
        reference.zero_grad()
        loss_of(alone, x, y).backward()
        reference.step()
    assert_same_parameters(net, alone)


def test_the_gradients_of_a_closure_are_reduced_before_the_step(world):
    world.run(steps_with_a_closure)


class Asking(torch.optim.SGD):
    def step(self, closure):
        loss = closure(2.0, backward=True)
        super().step()
        return loss


def takes_arguments():
    hvd.init()
    p = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(Asking([p], lr=1.0))

    def closure(factor, *, backward=False):
        loss = p.sum() * factor * (hvd.rank() + 1)
        if backward:
            loss.backward()
        return loss

    assert optimizer.step(closure).item() == 0.0
    assert p.tolist() == [-2.0 * mean_over_ranks(lambda r: r + 1)] * 2


def test_a_closure_may_take_arguments(world):
    world.run(takes_arguments)


def many_evaluations():
    hvd.init()
    p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    wrapped = torch.optim.LBFGS([p], lr=0.5, max_iter=8)
    optimizer = hvd.DistributedOptimizer(wrapped)

    def closure():
        optimizer.zero_grad()
        loss = ((p - hvd.rank()) ** 2).sum()
        loss.backward()
        return hvd.allreduce(loss.detach())

    for _ in range(4):
        optimizer.step(closure)
    assert p.tolist() == pytest.approx([mean_over_ranks(lambda r: r)] * 2, abs=1e-3)


def test_a_closure_may_be_evaluated_many_times(world):
    world.run(many_evaluations)


def synchronizes():
    hvd.init()
    p = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), op=hvd.Sum)
    (p * 2).backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()
    assert p.item() == -2 * hvd.size()
    for attempt in range(2):
        optimizer.zero_grad()
        (p * 2).backward()
        optimizer.synchronize()
        if attempt == 0:
            with pytest.warns(UserWarning, match="skip_synchronize"):
                optimizer.step()
        else:
            optimizer.step()
    assert p.item() == -3 * 2 * hvd.size(), "reduced once each"


def test_step_after_synchronize_warns_once_and_does_not_reduce_twice(world):
    world.run(synchronizes)
