"""Clipping and GradScaler between backward and step."""

import functools

import pytest
import torch
from torch import nn

import hvdlite as hvd
from tests.harness.on_ranks import on_ranks
from tests.optimizer import models

pytestmark = [pytest.mark.ranks(2), pytest.mark.mpis("mpich")]


@pytest.mark.parametrize("horovods_way", [False, True])
@on_ranks()
def test_clipping_sees_the_reduced_gradients_with_and_without_synchronize(horovods_way):
    twins = models.Twins()
    for x, y in models.batches(10, 2, hvd.size()):
        twins.zero_grad()
        twins.backward(x, y)
        if horovods_way:
            twins.optimizer.synchronize()
        wanted, norm = (nn.utils.clip_grad_norm_(net.parameters(), 0.1) for net, _ in twins.both)
        torch.testing.assert_close(norm, wanted, rtol=1e-9, atol=1e-12)
        if horovods_way:
            with twins.optimizer.skip_synchronize():
                twins.step()
        else:
            twins.step()


OPTIMIZERS = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "fused Adam": functools.partial(torch.optim.Adam, lr=0.01, fused=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("passes", [1, 2])
@on_ranks(2, 3)
def test_scaling_with_a_skipped_step_is_as_in_one_process(make, passes):
    """An overflow on one rank: in one process it overflows in the joined batch."""
    rank, size = hvd.rank(), hvd.size()
    twins = models.Twins(OPTIMIZERS[make], dtype=torch.float32, backward_passes_per_step=passes)
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) for _ in range(2)]
    data = list(models.batches(6 * passes, 2, size, torch.float32))
    for step in range(6):
        # Also as a loop does that knows only the model.
        for net, optimizer in twins.both:
            (optimizer if step % 3 else net).zero_grad()
        for x, y in data[step * passes : (step + 1) * passes]:
            overflow = float("inf") if step == 2 else 1.0
            losses = [
                models.loss_of(twins.alone, models.own(x, r, size), models.own(y, r, size))
                for r in range(size)
            ]
            losses[-1] = losses[-1] * overflow
            scalers[0].scale(sum(losses) / size).backward()
            loss = models.loss_of(twins.net, *models.mine(x, y))
            scalers[1].scale(loss * overflow if rank == size - 1 else loss).backward()
        for scaler, (net, optimizer) in zip(scalers, twins.both, strict=True):
            if step % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        models.assert_same_parameters(twins.net, twins.alone, rtol=1e-4, atol=1e-6)
        models.assert_bitwise_equal_on_all_ranks(twins.net)
    assert scalers[1].get_scale() == 256.0 * 2 / 2 * 2


@pytest.mark.parametrize("in_place", [False, True])
@on_ranks()
def test_a_skipped_step_needs_no_zero_grad_of_the_optimizer(in_place):
    """The loop never calls the optimizer's zero_grad, and the skipped step never comes."""
    p = nn.Parameter(torch.zeros(1))
    optimizer = models.sgd([p])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (1.0, float("inf"), 1.0):
        scaler.scale(p * factor * (hvd.rank() + 1)).sum().backward()
        scaler.step(optimizer)
        scaler.update()
        p.grad = p.grad.zero_() if in_place else None
    assert p.item() == -2 * models.mean_over_ranks(lambda r: r + 1)
    scaler.scale(p * float("inf")).sum().backward()
    scaler.step(optimizer)
    p.grad = None
    # After a skipped step one rank may reach nothing.
    if hvd.rank() == 0:
        p.sum().backward()
    optimizer.step()
    assert p.item() == -2 * models.mean_over_ranks(lambda r: r + 1) - 1 / hvd.size()
