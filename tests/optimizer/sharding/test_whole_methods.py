"""Clipping, GradScaler and broadcasts of sharded optimizers, beside those of unsharded ones."""

import pytest
import torch

import hvdlite as hvd
from tests.optimizer.sharding.models import (
    SMALL_BUCKETS,
    batch,
    differences,
    groups_of,
    odd,
    optimizer_of,
)


def clips(shard, order):
    hvd.init()
    alone, net = odd(torch.float64), odd(torch.float64)
    if not shard:
        hvd.share_parameters(net)
    plain = hvd.DistributedOptimizer(torch.optim.SGD(groups_of(alone), lr=0.1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(groups_of(net), lr=0.1), shard=shard)
    for step in range(3):
        for each, own in ((alone, plain), (net, optimizer)):
            own.zero_grad()
            each(batch(step, torch.float64)).square().mean().backward()
        wanted = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1, order)
        if shard:
            with pytest.raises(RuntimeError, match="are sharded by DistributedOptimizer"):
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1, order)
        norm = optimizer.clip_grad_norm_(0.1, order)
        torch.testing.assert_close(norm, wanted, rtol=1e-13, atol=0.0)
        everyones = hvd.allgather(norm.view(torch.int64)[None])
        assert (everyones == everyones[0]).all()
        plain.step()
        optimizer.step()
        for p, q in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-13)
    del optimizer, own
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)


@pytest.mark.ranks(3)
@pytest.mark.hosts("2,1")
@pytest.mark.wide_in("2,1")
@pytest.mark.parametrize(
    ("shard", "order"),
    [
        (True, 2.0),
        (False, 2.0),
        pytest.param("host", 2.0, marks=pytest.mark.wide),
        pytest.param(True, float("inf"), marks=pytest.mark.wide),
        pytest.param(True, 1.0, marks=pytest.mark.wide),
    ],
)
def test_clipping_has_the_norm_of_one_process_on_every_rank(world, shard, order):
    world.run(clips, shard, order, knobs=SMALL_BUCKETS)


def scales(shard, passes, fused):
    """One rank overflows in one step; some steps unscale before the step."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    nets = odd(), odd()
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(groups_of(net), lr=0.1, momentum=0.9, fused=fused),
            shard=each,
            op=hvd.Sum,
            backward_passes_per_step=passes,
        )
        for net, each in zip(nets, (False, shard), strict=True)
    ]
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) for _ in nets]
    for step in range(6):
        for net, optimizer, scaler in zip(nets, optimizers, scalers, strict=True):
            before = [param.detach().clone() for param in net.parameters()]
            optimizer.zero_grad()
            for number in range(passes):
                loss = net(batch(passes * step + number)).square().mean()
                if step == 2 and rank == size - 1:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                if shard != "host":  # which adds in another order between the hosts
                    optimizer.clip_grad_norm_(1e6)
            scaler.step(optimizer)
            scaler.update()
            same = all(torch.equal(*pair) for pair in zip(before, net.parameters(), strict=True))
            assert same == (step == 2), (step, optimizer is optimizers[1])
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert differences(nets[1], nets[0]) == [], step
    assert scalers[1].get_scale() == 256.0 * 2 / 2 * 2


@pytest.mark.ranks(3)
@pytest.mark.hosts("2,1")
@pytest.mark.wide_in("2,1")
@pytest.mark.parametrize(
    ("shard", "passes", "fused"),
    [
        (True, 1, False),
        (True, 1, True),
        pytest.param(True, 2, False, marks=pytest.mark.wide),
        pytest.param("host", 1, False, marks=pytest.mark.wide),
    ],
)
def test_all_ranks_skip_a_step_in_which_one_overflows(world, shard, passes, fused):
    world.run(scales, shard, passes, fused, knobs=SMALL_BUCKETS)


def one_part_overflows():
    """Only what rank 1 owns is infinite, after the reduction."""
    hvd.init()
    param = torch.nn.Parameter(torch.zeros(1000))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), shard=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for bad in (False, True, False):
        optimizer.zero_grad()
        weights = torch.ones(1000)
        weights[-1] = float("inf") if bad else 1.0
        scaler.scale((param * weights).sum()).backward()
        if bad:
            with pytest.raises(RuntimeError, match="the norm of order 2 of all gradients is inf"):
                optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="already been called on this optimizer"):
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert torch.equal(param.detach(), torch.full((1000,), -2.0))
    assert scaler.get_scale() == 2.0


@pytest.mark.ranks(2)
def test_an_overflow_in_the_part_of_one_owner_stops_all(world):
    world.run(one_part_overflows)


def one_owns_nothing():
    """One element, of one owner; and what a GradScaler refuses on one process too."""
    hvd.init()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), shard=True)
    for factor in (1.0, float("inf")):
        optimizer.zero_grad()
        scaler.scale(param.sum() * (factor if hvd.rank() == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert (param.item(), scaler.get_scale()) == (-1.0, 2.0)
    half = torch.nn.Parameter(torch.zeros(1000, dtype=torch.float16))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([half], lr=1.0), shard=True)
    scaler.scale(half.float().sum()).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(optimizer)


@pytest.mark.ranks(2)
def test_a_rank_that_owns_nothing_decides_as_the_others_do(world):
    world.run(one_owns_nothing)


def broadcasts():
    hvd.init()
    net = odd()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(net.parameters()), shard=True)
    with pytest.raises(ValueError, match=r"optimizer.load_state_dict\(hvd.broadcast_object"):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)


@pytest.mark.ranks(2)
def test_the_state_of_a_sharded_optimizer_is_not_broadcast(world):
    world.run(broadcasts)


def not_sharded():
    hvd.init()
    net = odd()
    for op in (hvd.Average, hvd.Adasum):
        optimizer = hvd.DistributedOptimizer(optimizer_of("Adam", net), op=op)
        net(torch.ones(1, 3, 6, 6)).sum().backward()
        wanted = torch.nn.utils.get_total_norm(
            [p.grad for p in net.parameters() if p.grad is not None]
        )
        torch.testing.assert_close(optimizer.clip_grad_norm_(0.5), wanted)
        optimizer.step()
        optimizer.zero_grad()
        assert bool(optimizer.full_state_dict()) == (hvd.rank() == 0)


@pytest.mark.ranks(2)
def test_optimizers_that_are_not_sharded_have_the_same_methods(world):
    world.run(not_sharded)
