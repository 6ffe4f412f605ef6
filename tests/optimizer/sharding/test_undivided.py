"""The state of parameters that are not divided: of shared ones one rank per host has it."""

import copy
import warnings

import pytest
import torch
from torch import nn

import hvdlite as hvd
from tests.harness.on_ranks import on_ranks
from tests.optimizer.sharding.alike import same_full, wrapped
from tests.optimizer.sharding.models import differences

WIDE = pytest.mark.wide


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


def adagrad(model):
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


def train(trainings, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(100 * hvd.rank() + step)
        rows = torch.randint(40, (5,), generator=generator)
        for model, optimizer in trainings:
            optimizer.zero_grad()
            model(rows).backward()
            optimizer.step()
    assert not any(differences(model, trainings[0][0]) for model, _ in trainings)


@pytest.mark.parametrize(
    "shard", [True, pytest.param("host", marks=WIDE), pytest.param(False, marks=WIDE)]
)
@on_ranks(hosts=("2,1",))
def test_the_state_of_shared_parameters_is_that_of_the_rank_which_updates(shard):
    warnings.simplefilter("ignore")  # torch's, of sparse tensors
    alone, net = Undivided(shared=False), Undivided(shared=True)
    plain, optimizer = wrapped(adagrad, alone), wrapped(adagrad, net, shard=shard)
    train([(alone, plain), (net, optimizer)], range(2))
    same_full(optimizer.full_state_dict(), plain)
    # Adagrad has made a state on every rank, and only one per host goes on with it.
    assert (net.table.weight in optimizer.state) == (hvd.local_rank() == 0)

    own = copy.deepcopy(optimizer.state_dict())
    shards = hvd.allgather_object(own)
    full = hvd.broadcast_object(plain.state_dict(), 0)
    values = copy.deepcopy(alone.state_dict())
    # Where parameters are not shared, every rank needs the state that one had.
    given = (own, shards) if shard else (full,)
    trainings = [(alone, plain)]
    for state in given:
        for shared in (True, False):
            model = Undivided(shared)
            model.load_state_dict(values)
            optimizer = wrapped(adagrad, model, shard=shard)
            optimizer.load_state_dict(copy.deepcopy(state))
            trainings.append((model, optimizer))
    train(trainings, range(2, 4))
    for model, optimizer in trainings[1:]:
        if shard or hvd.is_shared(model.table.weight):
            same_full(optimizer.full_state_dict(), plain)
