"""What step does: closures, and synchronize before it."""

import numpy as np
import pytest
import torch
from torch import nn

import hvdlite as hvd
from tests.optimizer.models import (
    assert_bitwise_equal_on_all_ranks,
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


def line_search(line_search_fn, op, max_iter):
    """Each rank has its own loss, far from the mean."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    alone, net = model(), model()
    options = {"lr": 0.1, "max_iter": max_iter, "line_search_fn": line_search_fn}
    reference = torch.optim.LBFGS(alone.parameters(), **options)
    optimizer = torch.optim.LBFGS(net.parameters(), **options)
    optimizer = hvd.DistributedOptimizer(optimizer, op=op)
    factor = size if op is hvd.Sum else 1
    evaluations = []
    for x, y in batches(5, 4, size):
        # Less noise on the last ranks: some could end their search earlier than others.
        y = y + torch.linspace(3, 0, len(y), dtype=y.dtype)[:, None]
        counts = [0, 0]

        def closure(x=x, y=y, counts=counts):
            optimizer.zero_grad()
            loss = loss_of(net, own(x, rank, size), own(y, rank, size))
            loss.backward()
            counts[0] += 1
            return loss

        def whole(x=x, y=y, counts=counts):
            reference.zero_grad()
            loss = loss_of(alone, x, y) * factor
            loss.backward()
            counts[1] += 1
            return loss

        wanted, loss = reference.step(whole), optimizer.step(closure)
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-7, atol=1e-9)
        assert counts[0] == counts[1]
        assert_same_parameters(net, alone, rtol=1e-5, atol=1e-7)
        assert_bitwise_equal_on_all_ranks(net)
        evaluations.append(counts[0])
    return evaluations


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("line_search_fn", "op", "max_iter"),
    [
        (None, hvd.Average, 6),
        ("strong_wolfe", hvd.Average, 6),
        ("strong_wolfe", hvd.Average, 2),
        ("strong_wolfe", hvd.Sum, 6),
    ],
)
def test_lbfgs_is_that_of_one_process_on_the_joined_batch(world, line_search_fn, op, max_iter):
    evaluations = world.run(line_search, line_search_fn, op, max_iter)
    assert all(each == evaluations[0] for each in evaluations)
    if line_search_fn is not None:
        assert len(set(evaluations[0])) > 1, "some steps need more evaluations than others"


def kinds_of_losses():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    p = nn.Parameter(torch.ones(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=0.0))
    mean = mean_over_ranks(lambda r: r + 1)
    own_loss = rank + 1
    found = [
        optimizer.step(lambda loss=loss: loss)
        for loss in (
            p.double().sum() * own_loss,
            torch.tensor([[own_loss]], dtype=torch.bfloat16),
            torch.tensor(own_loss),
            float(own_loss),
            own_loss,
            np.float32(own_loss),
            np.int64(own_loss),
            0.0,
        )
    ]
    assert found == [mean] * 7 + [0.0]
    assert [(each.dtype, tuple(each.shape)) for each in found[:3]] == [
        (torch.float64, ()),
        (torch.bfloat16, (1, 1)),
        (torch.float64, ()),
    ]
    assert not found[0].requires_grad
    assert list(map(type, found[3:])) == [float, float, np.float32, float, float]
    # A result that is not a number is not averaged; a rank without a number counts as zero, as its
    # gradient does.
    assert optimizer.step(lambda: None) is None
    assert optimizer.step(lambda: "done") == "done"
    many = torch.ones(3)
    assert optimizer.step(lambda: many) is many
    assert optimizer.step(lambda: None if rank == 0 else 6.0) == 6.0 * (size - 1) / size
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=0.0), op=hvd.Sum)
    assert optimizer.step(lambda: own_loss) == mean * size


@pytest.mark.ranks(2, 3)
def test_a_closure_may_return_any_number_and_step_returns_the_mean(world):
    world.run(kinds_of_losses)
