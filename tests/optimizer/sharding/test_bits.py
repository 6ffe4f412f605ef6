"""Sharded training gives the bits of unsharded training, in every step."""

import pytest
import torch

import hvdlite as hvd
from tests.optimizer.sharding.models import OPTIMIZERS, batch, differences, groups_of, odd

SMALL_BUCKETS = {"HVDLITE_BUCKET_BYTES": "6000", "HVDLITE_FIRST_BUCKET_BYTES": "500"}


def optimizer_of(name, net):
    kind, options = OPTIMIZERS[name]
    return kind(groups_of(net, **options), **options)


def trains_alike(name, shard, shared=False, dtype_name="float32", steps=5, **arguments):
    hvd.init()
    dtype = getattr(torch, dtype_name)
    alone, net = odd(dtype), odd(dtype)
    if shared:
        hvd.share_parameters(net)
    plain = hvd.DistributedOptimizer(optimizer_of(name, alone), **arguments)
    cut = hvd.DistributedOptimizer(
        optimizer_of(name, net), net.named_parameters(), shard=shard, **arguments
    )
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (plain, cut)]
    for step in range(steps):
        for each, optimizer in ((alone, plain), (net, cut)):
            optimizer.zero_grad()
            each(batch(step, dtype)).square().mean().backward()
            if shard and optimizer is cut:
                assert all(param.grad is None for param in net.parameters())
            optimizer.step()
        assert differences(net, alone) == [], f"after step {step + 1}"
        for scheduler in schedulers:
            scheduler.step()
    count = sum(
        value.numel()
        for state in cut.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    )
    hvd.barrier()
    return count


@pytest.mark.ranks(1, 2, 3, 4, 7)
@pytest.mark.hosts("1,1", "2,1", "1,1,1")
@pytest.mark.wide_in(4, 7, "2,1")
@pytest.mark.parametrize("shard", [True, "host", False])
@pytest.mark.parametrize("shared", [False, True], ids=["ordinary", "shared"])
def test_every_step_has_the_bits_of_the_unsharded_one(world, shard, shared):
    if not shard and not shared:
        pytest.skip("not sharded")
    world.run(trains_alike, "Adam", shard, shared, knobs=SMALL_BUCKETS)
