"""The state of parameters that are not divided: of shared ones one rank per host has it."""

import copy
import warnings

import pytest
import torch
from torch import nn

import hvdlite as hvd
from tests.optimizer.sharding.alike import same_full

SHARDS = [
    True,
    pytest.param("host", marks=pytest.mark.wide),
    pytest.param(False, marks=pytest.mark.wide),
]


class Undivided(nn.Module):
    """Sparse gradients, and memory with gaps; beside them one that is divided."""

    def __init__(self, shared):
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(40, 3, sparse=True)
        self.gaps = nn.Parameter(torch.randn(3, 8)[:, ::2])
        self.dense = nn.Linear(3, 300)
        if shared:
            hvd.share_parameters(self)

    def forward(self, rows):
        return self.dense(self.table(rows) @ (self.gaps @ self.gaps.T)).square().mean()


def optimizer_of(model, **arguments):
    adagrad = torch.optim.Adagrad(model.parameters(), lr=0.1)
    return hvd.DistributedOptimizer(adagrad, model.named_parameters(), **arguments)


def train(models, optimizers, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(100 * hvd.rank() + step)
        rows = torch.randint(40, (5,), generator=generator)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(rows).backward()
            optimizer.step()
    assert all(
        torch.equal(p, q)
        for model in models
        for p, q in zip(model.parameters(), models[0].parameters(), strict=True)
    )


def keeps_the_leaders(shard):
    warnings.simplefilter("ignore")  # torch's, of sparse tensors
    hvd.init()
    alone, net = Undivided(shared=False), Undivided(shared=True)
    plain, optimizer = optimizer_of(alone), optimizer_of(net, shard=shard)
    train([alone, net], [plain, optimizer], range(2))
    same_full(optimizer.full_state_dict(), plain)
    # Adagrad has made a state on every rank, and only one per host goes on with it.
    assert (net.table.weight in optimizer.state) == (hvd.local_rank() == 0)

    own = copy.deepcopy(optimizer.state_dict())
    shards = hvd.allgather_object(own)
    full = hvd.broadcast_object(plain.state_dict(), 0)
    values = copy.deepcopy(alone.state_dict())
    # Where parameters are not shared, every rank needs the state that one had.
    given = (own, shards) if shard else (full,)
    models = [alone]
    optimizers = [plain]
    for state in given:
        for shared in (True, False):
            model = Undivided(shared)
            model.load_state_dict(values)
            models.append(model)
            optimizers.append(optimizer_of(model, shard=shard))
            optimizers[-1].load_state_dict(copy.deepcopy(state))
    train(models, optimizers, range(2, 4))
    for each, model in zip(optimizers[1:], models[1:], strict=True):
        if shard or hvd.is_shared(model.table.weight):
            same_full(each.full_state_dict(), plain)


@pytest.mark.hosts("2,1")
@pytest.mark.parametrize("shard", SHARDS)
def test_the_state_of_shared_parameters_is_that_of_the_rank_which_updates(world, shard):
    world.run(keeps_the_leaders, shard)
