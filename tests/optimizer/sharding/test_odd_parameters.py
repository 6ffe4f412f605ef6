"""Sharded optimizers of complex parameters, and of some without elements; in a second world."""

import copy

import pytest
import torch

import hvdlite as hvd


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
        assert sorted(full["state"]) == [0, 2, 3]
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
