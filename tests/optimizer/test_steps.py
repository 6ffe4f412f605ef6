"""What step does: closures, and synchronize before it."""

import collections
import functools

import numpy as np
import pytest
import torch
from torch import nn

import hvdlite as hvd
from tests.harness.on_ranks import on_ranks
from tests.optimizer import models

pytestmark = [pytest.mark.ranks(2), pytest.mark.mpis("mpich")]


class Asking(torch.optim.SGD):
    def step(self, closure):
        loss = closure(2.0, sign=-1)
        super().step()
        return loss


@on_ranks()
def test_a_closure_may_take_arguments():
    p = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(Asking([p], lr=1.0))

    def closure(factor, *, sign=1):
        loss = p.sum() * factor * sign * (hvd.rank() + 1)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 0.0
    assert p.tolist() == [2.0 * models.mean_over_ranks(lambda r: r + 1)] * 2


@on_ranks()
def test_step_after_synchronize_warns_once_and_does_not_reduce_twice():
    p = nn.Parameter(torch.zeros(1))
    optimizer = models.sgd([p], op=hvd.Sum)
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


@pytest.mark.parametrize(
    ("line_search_fn", "op", "max_iter"),
    [
        (None, hvd.Average, 6),
        ("strong_wolfe", hvd.Average, 6),
        ("strong_wolfe", hvd.Average, 2),
        ("strong_wolfe", hvd.Sum, 6),
    ],
)
@on_ranks(2, 3)
def test_lbfgs_is_that_of_one_process_on_the_joined_batch(line_search_fn, op, max_iter):
    """Each rank has its own loss, far from the mean."""
    options = {"lr": 0.1, "max_iter": max_iter, "line_search_fn": line_search_fn}
    twins = models.Twins(lambda params: torch.optim.LBFGS(params, **options), op=op)
    evaluations = []

    def closure(net, optimizer, factor, *batch):
        calls[net] += 1
        optimizer.zero_grad()
        loss = models.loss_of(net, *batch) * factor
        loss.backward()
        return loss

    for x, y in models.batches(5, 4, hvd.size()):
        # Less noise on the last ranks: some could end their search earlier than others.
        y = y + torch.linspace(3, 0, len(y), dtype=y.dtype)[:, None]
        calls = collections.Counter()
        whole = functools.partial(closure, *twins.both[0], twins.factor, x, y)
        wanted = twins.reference.step(whole)
        own = functools.partial(closure, *twins.both[1], 1, *models.mine(x, y))
        by_name = len(evaluations) % 2
        loss = twins.optimizer.step(closure=own) if by_name else twins.optimizer.step(own)
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-7, atol=1e-9)
        assert calls[twins.alone] == calls[twins.net]
        models.assert_same_parameters(twins.net, twins.alone, rtol=1e-5, atol=1e-7)
        models.assert_bitwise_equal_on_all_ranks(twins.net)
        evaluations.append(calls[twins.net])
    models.same_on_all_ranks(evaluations)
    if line_search_fn is not None:
        assert len(set(evaluations)) > 1, "some steps need more evaluations than others"


@on_ranks(2, 3)
def test_a_closure_may_return_any_number_and_step_returns_the_mean():
    rank, size = hvd.rank(), hvd.size()
    p = nn.Parameter(torch.ones(1))
    optimizer = models.sgd([p], lr=0.0)
    mean = models.mean_over_ranks(lambda r: r + 1)
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
    kinds = [(each.dtype, tuple(each.shape)) for each in found[:3]]
    assert kinds == [(torch.float64, ()), (torch.bfloat16, (1, 1)), (torch.float64, ())]
    assert not found[0].requires_grad
    assert list(map(type, found[3:])) == [float, float, np.float32, float, float]
    # A result that is not a number is not averaged; a rank without a number counts as zero, as its
    # gradient does.
    many = torch.ones(3)
    for other in (None, "done", many):
        assert optimizer.step(lambda other=other: other) is other
    assert optimizer.step(lambda: None if rank == 0 else 6.0) == 6.0 * (size - 1) / size
    assert models.sgd([p], lr=0.0, op=hvd.Sum).step(lambda: own_loss) == mean * size
