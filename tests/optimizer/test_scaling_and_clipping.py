"""Clipping and GradScaler between backward and step."""

import copy

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


def clips(horovods_way):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    alone, net = model(), model()
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    for x, y in batches(10, 2, size):
        reference.zero_grad()
        loss_of(alone, x, y).backward()
        wanted = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        reference.step()
        optimizer.zero_grad()
        loss_of(net, own(x, rank, size), own(y, rank, size)).backward()
        if horovods_way:
            optimizer.synchronize()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        torch.testing.assert_close(norm, wanted, rtol=1e-9, atol=1e-12)
        if horovods_way:
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    assert_same_parameters(net, alone)


@pytest.mark.parametrize("horovods_way", [False, True])
def test_clipping_sees_the_reduced_gradients_with_and_without_synchronize(world, horovods_way):
    world.run(clips, horovods_way)


def scales_gradients():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    net = model(torch.float32)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    for step, (x, y) in enumerate(batches(6, 2, size, torch.float32)):
        # As a loop does that knows only the model.
        net.zero_grad()
        before = copy.deepcopy(net.state_dict())
        loss = loss_of(net, own(x, rank, size), own(y, rank, size))
        if step == 2 and rank == size - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        unchanged = all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
        assert unchanged == (step == 2)
    assert_bitwise_equal_on_all_ranks(net)
    assert scaler.get_scale() == 2.0**9


def test_all_ranks_skip_a_step_whose_gradients_overflowed_on_one(world):
    world.run(scales_gradients)


def as_one_process_scales(make, passes):
    """Also with an overflow on one rank: in one process it overflows in the joined batch."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    alone, net = model(torch.float32), model(torch.float32)
    kinds = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "fused Adam": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    }
    reference = kinds[make](alone.parameters())
    optimizer = hvd.DistributedOptimizer(
        kinds[make](net.parameters()), backward_passes_per_step=passes
    )
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) for _ in range(2)]
    data = list(batches(6 * passes, 2, size, torch.float32))
    for step in range(6):
        reference.zero_grad()
        optimizer.zero_grad()
        for x, y in data[step * passes : (step + 1) * passes]:
            overflow = float("inf") if step == 2 else 1.0
            losses = [loss_of(alone, own(x, r, size), own(y, r, size)) for r in range(size)]
            losses[-1] = losses[-1] * overflow
            scalers[0].scale(sum(losses) / size).backward()
            loss = loss_of(net, own(x, rank, size), own(y, rank, size))
            scalers[1].scale(loss * overflow if rank == size - 1 else loss).backward()
        for scaler, each, module in zip(scalers, (reference, optimizer), (alone, net), strict=True):
            if step % 2:
                scaler.unscale_(each)
                nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            scaler.step(each)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert_same_parameters(net, alone, rtol=1e-4, atol=1e-6)
    assert scalers[1].get_scale() == 256.0 * 2 / 2 * 2


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("make", ["SGD", "fused Adam"])
@pytest.mark.parametrize("passes", [1, 2])
def test_scaling_with_a_skipped_step_is_as_in_one_process(world, make, passes):
    world.run(as_one_process_scales, make, passes)


def skips_without_telling():
    """The loop never calls the optimizer's zero_grad, and the skipped step never comes."""
    hvd.init()
    p = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        p.grad = None
        factor = float("inf") if step == 1 else 1.0
        scaler.scale(p * factor * (hvd.rank() + 1)).sum().backward()
        scaler.step(optimizer)
        scaler.update()
    assert p.item() == -2 * mean_over_ranks(lambda r: r + 1)


def test_a_skipped_step_needs_no_zero_grad_of_the_optimizer(world):
    world.run(skips_without_telling)


def skips_and_zeroes_in_place():
    hvd.init()
    p = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (1.0, float("inf"), 1.0):
        scaler.scale(p * factor * (hvd.rank() + 1)).sum().backward()
        scaler.step(optimizer)
        scaler.update()
        p.grad.zero_()
    assert p.item() == -2 * mean_over_ranks(lambda r: r + 1)


def skips_and_then_one_rank_reaches_nothing():
    hvd.init()
    p = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(p * float("inf")).sum().backward()
    scaler.step(optimizer)
    scaler.update()
    p.grad = None
    if hvd.rank() == 0:
        p.sum().backward()
    optimizer.step()
    assert p.item() == -1 / hvd.size()


@pytest.mark.parametrize(
    "case", [skips_and_zeroes_in_place, skips_and_then_one_rank_reaches_nothing]
)
def test_after_a_skipped_step_the_next_one_begins(world, case):
    world.run(case)
