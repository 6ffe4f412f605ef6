"""Models that train with a sharded optimizer as with an unsharded one."""

import pytest
import torch
from torch import nn

import hvdlite as hvd
from tests.harness.on_ranks import on_ranks
from tests.optimizer.sharding.alike import same_full, train_alike
from tests.optimizer.sharding.models import adam


def attention():
    """With dropout."""
    return nn.TransformerEncoderLayer(12, 2, 31, dropout=0.2, batch_first=True)


def channels_last():
    """Convolutions and norms, also grouped and transposed ones."""
    return nn.Sequential(
        nn.Flatten(0),
        nn.Unflatten(0, (1, 4, 9, 5)),
        nn.Conv2d(4, 12, 3, padding=1),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 12, 3, groups=3),
        nn.ConvTranspose2d(12, 5, 2),
    ).to(memory_format=torch.channels_last)


class Dtypes(nn.Module):
    """Several dtypes; parameters of one element, of none and of no dimension."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 33)
        self.second = nn.Linear(33, 17, dtype=torch.float64)
        self.third = nn.Linear(17, 9, dtype=torch.bfloat16)
        self.one = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.none = nn.Parameter(torch.empty(3, 0))
        self.scalar = nn.Parameter(torch.tensor(0.5, dtype=torch.bfloat16))
        self.complex = nn.Parameter(torch.ones(5, dtype=torch.complex64))

    def forward(self, x):
        x = self.second(self.first(x).tanh().double() * self.one)
        x = self.third(x.tanh().bfloat16()) * self.scalar
        return x.float() * self.complex.abs().sum() + self.none.sum()


MODELS = {"attention": attention, "channels last": channels_last, "dtypes": Dtypes}


@pytest.mark.wide_in(3)
@pytest.mark.parametrize(("shard", "shared"), [(True, False), ("host", True), (False, True)])
@pytest.mark.parametrize("name", MODELS)
@on_ranks(2, 3)
def test_models_have_the_bits_of_unsharded_training(name, shard, shared):
    def loss(net, step):
        x = torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(step + 50 * hvd.rank()))
        return net(x).square().mean()

    plain, cut = train_alike(adam, MODELS[name](), loss, shard=shard, shared=shared)
    same_full(cut.full_state_dict(), plain)
