"""The models of the training tests: small, and in float64, so that rounding hides no fault."""

import torch
from torch import nn

import hvdlite as hvd

FEATURES = 6


def model(dtype=torch.float64):
    """The same on every rank."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
    ).to(dtype)


def batches(steps, rows, size, dtype=torch.float64):
    """For each step the rows of all ranks, one rank after the other."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        x = torch.randn(rows * size, FEATURES, dtype=torch.float64, generator=generator)
        y = x.sin().sum(1, keepdim=True)
        yield x.to(dtype), y.to(dtype)


def own(joined, rank, size):
    """This rank's rows."""
    return joined.chunk(size)[rank]


def mean_over_ranks(value_of):
    """The mean of a function of the rank."""
    return sum(float(value_of(r)) for r in range(hvd.size())) / hvd.size()


def loss_of(net, x, y):
    return nn.functional.mse_loss(net(x), y)


def assert_same_parameters(net, other, rtol=1e-9, atol=1e-12):
    for (name, p), q in zip(net.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def assert_bitwise_equal_on_all_ranks(net):
    flat = torch.cat([p.detach().reshape(-1) for p in net.parameters()]).view(torch.int32)
    everyones = hvd.allgather(flat[None])
    assert (everyones == everyones[0]).all()
