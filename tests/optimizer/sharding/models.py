"""Models whose sharded training is compared bit by bit with unsharded training."""

import contextlib

import torch
from torch import nn

import hvdlite as hvd
from hvdlite.optimizer.sharding import division

SMALL_BUCKETS = {"HVDLITE_BUCKET_BYTES": "6000", "HVDLITE_FIRST_BUCKET_BYTES": "500"}

OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.05}),
    "momentum": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.05}),
    "foreach": (torch.optim.Adam, {"lr": 0.01, "foreach": True}),
    "fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "fused momentum": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "fused": True}),
}


class Odd(nn.Module):
    """Odd shapes, tied weights, channels last, a parameter that is never used, a scalar."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 7, 3).to(memory_format=torch.channels_last)
        self.mix = nn.Linear(7 * 16, 37)
        self.tied = nn.Linear(37, 37, bias=False)
        self.again = nn.Linear(37, 37)
        self.again.weight = self.tied.weight
        self.unused = nn.Parameter(torch.ones(11))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.end = nn.Linear(37, 5)

    def forward(self, x):
        x = self.conv(x.to(memory_format=torch.channels_last)).tanh().flatten(1)
        x = self.again(self.tied(self.mix(x).tanh()).tanh())
        return self.end(x) * self.scale


def odd(dtype=torch.float32):
    torch.manual_seed(1)
    return Odd().to(dtype)


def batch(step, dtype=torch.float32):
    """This rank's."""
    generator = torch.Generator().manual_seed(1000 * hvd.rank() + step)
    return torch.randn(2, 3, 6, 6, generator=generator).to(dtype)


def loss_of(net, step):
    """Of this rank's batch."""
    return net(batch(step, net.scale.dtype)).square().mean()


def groups_of(net, **options):
    """Two groups with options of their own."""
    params = list(net.parameters())
    return [{"params": params[::2]}, {"params": params[1::2], "lr": options.get("lr", 1) / 3}]


def optimizer_of(name, net):
    kind, options = OPTIMIZERS[name]
    return kind(groups_of(net, **options), **options)


def adam(net):
    return optimizer_of("Adam", net)


@contextlib.contextmanager
def portions_of(elems):
    """Inside, portions have about so many elements of float32."""
    before, division.PORTION_BYTES = division.PORTION_BYTES, 4 * elems // torch.get_num_threads()
    try:
        yield
    finally:
        division.PORTION_BYTES = before


def differences(net, other):
    """The names of the parameters whose bits differ."""
    pairs = zip(net.named_parameters(), other.parameters(), strict=True)
    return [name for (name, p), q in pairs if not torch.equal(p, q) or p.isnan().any()]
