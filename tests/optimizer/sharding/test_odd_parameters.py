"""Sharded optimizers of complex parameters, and of some without elements; in a second world."""

import copy

import pytest
import torch

import hvdlite as hvd
from tests.optimizer.sharding.alike import same_full
from tests.optimizer.sharding.models import OPTIMIZERS


def trains_in_two_worlds(shard):
    hvd.init()
    torch.manual_seed(1)
    alone = [torch.nn.Parameter(torch.randn(301, dtype=torch.complex64)) for _ in range(3)]
    alone.insert(1, torch.nn.Parameter(torch.empty(0, 4)))
    params = copy.deepcopy(alone)
    plain = hvd.DistributedOptimizer(torch.optim.Adam(alone, lr=0.01))
    cut = hvd.DistributedOptimizer(torch.optim.Adam(params, lr=0.01), shard=shard)

    def step():
        for each, optimizer in ((alone, plain), (params, cut)):
            loss = sum((param.abs() ** 2).sum() * (hvd.rank() + 1) for param in each)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(map(torch.equal, params, alone))

    step()
    full = cut.full_state_dict()
    saved = copy.deepcopy(full)
    step()
    if hvd.rank() == 0:
        assert sorted(full["state"]) == [0, 1, 2, 3]
        for index, state in saved["state"].items():
            assert torch.equal(full["state"][index]["exp_avg"], state["exp_avg"])
    hvd.shutdown()
    hvd.init()
    step()
    hvd.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shard", [True, "host"])
def test_complex_and_empty_parameters_train_on_in_a_second_world(world, shard):
    world.run(trains_in_two_worlds, shard)


def some_empty():
    torch.manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in ((5,), (0,), (3, 2), (4, 0), ())]


def has_the_state_of_empty_parameters(shard):
    hvd.init()
    for kind, options in OPTIMIZERS.values():
        alone, params = some_empty(), some_empty()
        plain = kind(alone, **options)
        cut = hvd.DistributedOptimizer(kind(params, **options), shard=shard)
        for step in range(4):
            for each, optimizer in ((alone, plain), (params, cut)):
                optimizer.zero_grad()
                sum((param**2).sum() for param in each).backward()
                optimizer.step()
            full = cut.full_state_dict()
            same_full(full, plain)
            assert all(param.grad is None for param in params)
            if step == 1:
                cut = hvd.DistributedOptimizer(kind(params, **options), shard=shard)
                cut.load_state_dict(hvd.broadcast_object(full))
            if step == 2:
                cut.load_state_dict(cut.state_dict())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shard", [True, "host"])
def test_the_full_state_has_that_of_empty_parameters_as_in_torch(world, shard):
    world.run(has_the_state_of_empty_parameters, shard)
