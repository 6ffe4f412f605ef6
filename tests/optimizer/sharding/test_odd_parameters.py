"""Sharded optimizers of complex parameters, and of some without elements; in a second world."""

import copy

import pytest
import torch

import hvdlite as hvd
from tests.harness.on_ranks import on_ranks
from tests.optimizer.sharding.alike import Pair, same_full
from tests.optimizer.sharding.models import OPTIMIZERS, adam

SHARDS = pytest.mark.parametrize("shard", [True, "host"])


def squares(net, step):
    return sum((param.abs() ** 2).sum() for param in net) * (hvd.rank() + 1)


@SHARDS
@on_ranks(2)
def test_complex_and_empty_parameters_train_on_in_a_second_world(shard):
    values = [torch.randn(301, dtype=torch.complex64) for _ in range(3)]
    values.insert(1, torch.empty(0, 4))
    pair = Pair(adam, torch.nn.ParameterList(values), shard=shard)
    pair.train(range(1), squares)
    full = pair.cut.full_state_dict()
    saved = copy.deepcopy(full)
    pair.train(range(1), squares)
    if hvd.rank() == 0:
        assert sorted(full["state"]) == [0, 1, 2, 3]
        for index, state in saved["state"].items():
            assert torch.equal(full["state"][index]["exp_avg"], state["exp_avg"])
    hvd.shutdown()
    hvd.init()
    pair.train(range(1), squares)
    hvd.barrier()


@SHARDS
@on_ranks(2)
def test_the_full_state_has_that_of_empty_parameters_as_in_torch(shard):
    values = [torch.randn(shape) for shape in ((5,), (0,), (3, 2), (4, 0), ())]
    for kind, options in OPTIMIZERS.values():
        alone, net = (torch.nn.ParameterList(map(torch.clone, values)) for _ in range(2))
        plain = kind(alone, **options)
        cut = hvd.DistributedOptimizer(kind(net, **options), shard=shard)
        for step in range(4):
            for each, optimizer in ((alone, plain), (net, cut)):
                optimizer.zero_grad()
                sum((param**2).sum() for param in each).backward()
                optimizer.step()
            full = cut.full_state_dict()
            same_full(full, plain)
            assert all(param.grad is None for param in net)
            if step == 1:
                cut = hvd.DistributedOptimizer(kind(net, **options), shard=shard)
                cut.load_state_dict(hvd.broadcast_object(full))
            if step == 2:
                cut.load_state_dict(cut.state_dict())
