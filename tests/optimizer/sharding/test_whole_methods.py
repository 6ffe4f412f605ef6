"""Clipping and GradScaler of sharded optimizers, beside those of unsharded ones."""

import functools

import pytest
import torch

import hvdlite as hvd
from tests.harness.on_ranks import on_ranks
from tests.optimizer.models import sgd
from tests.optimizer.sharding.alike import Pair, wrapped
from tests.optimizer.sharding.models import SMALL_BUCKETS, odd, optimizer_of


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
@on_ranks(3, hosts=("2,1",), knobs=SMALL_BUCKETS)
def test_clipping_has_the_norm_of_one_process_on_every_rank(shard, order):
    make = functools.partial(optimizer_of, "SGD")
    pair = Pair(make, odd(torch.float64), shard=shard, shared=not shard)
    net, alone = pair.net, pair.alone
    for step in range(3):
        pair.backward(step)
        wanted = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1, order)
        if shard:
            with pytest.raises(RuntimeError, match="are sharded by DistributedOptimizer"):
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1, order)
        norm = pair.cut.clip_grad_norm_(0.1, order)
        torch.testing.assert_close(norm, wanted, rtol=1e-13, atol=0.0)
        everyones = hvd.allgather(norm.view(torch.int64)[None])
        assert (everyones == everyones[0]).all()
        pair.step()
        for p, q in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-13)
    del pair
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)


@on_ranks(2)
def test_an_overflow_in_the_part_of_one_owner_stops_all():
    """Only what rank 1 owns is infinite, after the reduction."""
    param = torch.nn.Parameter(torch.zeros(1000))
    optimizer = sgd([param], shard=True)
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


@on_ranks(2)
def test_a_rank_that_owns_nothing_decides_as_the_others_do():
    """One element, of one owner; and what a GradScaler refuses on one process too."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = sgd([param], shard=True)
    for factor in (1.0, float("inf")):
        optimizer.zero_grad()
        scaler.scale(param.sum() * (factor if hvd.rank() == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert (param.item(), scaler.get_scale()) == (-1.0, 2.0)
    half = torch.nn.Parameter(torch.zeros(1000, dtype=torch.float16))
    optimizer = sgd([half], shard=True)
    scaler.scale(half.float().sum()).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(optimizer)


@on_ranks(2)
def test_optimizers_that_are_not_sharded_have_the_same_methods():
    net = odd()
    for op in (hvd.Average, hvd.Adasum):
        optimizer = wrapped(functools.partial(optimizer_of, "Adam"), net, op=op)
        net(torch.ones(1, 3, 6, 6)).sum().backward()
        wanted = torch.nn.utils.get_total_norm(
            [p.grad for p in net.parameters() if p.grad is not None]
        )
        torch.testing.assert_close(optimizer.clip_grad_norm_(0.5), wanted)
        optimizer.step()
        optimizer.zero_grad()
        assert bool(optimizer.full_state_dict()) == (hvd.rank() == 0)
