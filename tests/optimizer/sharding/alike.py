"""Trains a model with a sharded optimizer beside a copy with an unsharded one, in each rank."""

import copy

import torch

import hvdlite as hvd
from tests.optimizer.sharding.cuts import assert_same_state
from tests.optimizer.sharding.models import differences


def train_alike(net, make, loss, *, shard=True, shared=False, steps=4, **arguments):
    """Every step has the same bits. Returns both optimizers: the unsharded one first.

    make: an optimizer of a model. loss: of a model and the number of a step, on this rank.
    """
    alone = copy.deepcopy(net)
    if shared:
        hvd.share_parameters(net)
    plain = hvd.DistributedOptimizer(make(alone), alone.named_parameters(), **arguments)
    cut = hvd.DistributedOptimizer(make(net), net.named_parameters(), shard=shard, **arguments)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (plain, cut)]
    for step in range(steps):
        for model, optimizer in ((alone, plain), (net, cut)):
            optimizer.zero_grad()
            torch.manual_seed(100 * step + hvd.rank())  # of dropout
            loss(model, step).backward()
            if shard and optimizer is cut and cut._hvdlite_update.shards.elementwise:
                assert all(param.grad is None for param in net.parameters())
            optimizer.step()
        assert differences(net, alone) == [], f"after step {step + 1}"
        for scheduler in schedulers:
            scheduler.step()
    return plain, cut


def same_full(full, plain):
    """Whether rank 0 has what one process has, and the others nothing."""
    wanted = plain.state_dict() if hvd.rank() == 0 else {}
    assert full.keys() == wanted.keys()
    if wanted:
        assert full["param_groups"] == wanted["param_groups"]
        assert_same_state(full["state"], wanted["state"])
