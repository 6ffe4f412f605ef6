"""The models of the training tests: small, and in float64, so that rounding hides no fault."""

import contextlib
import functools
import logging

import torch
from torch import nn

import hvdlite as hvd

FEATURES = 6

SMALL_BUCKETS = {"HVDLITE_BUCKET_BYTES": "1500", "HVDLITE_FIRST_BUCKET_BYTES": "100"}
# Each gradient is a bucket of its own, and starts when it comes.
ONE_BY_ONE = {"HVDLITE_BUCKET_BYTES": "0", "HVDLITE_FIRST_BUCKET_BYTES": "0"}

SGD = functools.partial(torch.optim.SGD, lr=0.1)
OPTIMIZERS = {
    "SGD": SGD,
    "momentum": functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True),
    "Adam": functools.partial(torch.optim.Adam, lr=0.01),
}


def model(dtype=torch.float64):
    """The same on every rank."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
    ).to(dtype)


def of_any_kind():
    """Parameters by name, all of ones."""
    return {
        "float32": nn.Parameter(torch.ones(5)),
        "float64": nn.Parameter(torch.ones(3, dtype=torch.float64)),
        "bfloat16": nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
        "complex": nn.Parameter(torch.ones(2, dtype=torch.complex64)),
        "channels last": nn.Parameter(torch.ones(3, 4, 2, 2).to(memory_format=torch.channels_last)),
        "transposed": nn.Parameter(torch.ones(3, 2).t()),
        "gaps": nn.Parameter(torch.ones(4, 4)[:, ::2]),
        "one element of a column": nn.Parameter(torch.ones(1, 6)[:, 0]),
        "scalar": nn.Parameter(torch.tensor(1.0)),
        "empty": nn.Parameter(torch.ones(0, 2)),
    }


def numbered(params, first):
    """A loss whose gradients are these numbers and the next ones."""
    return sum(
        (p * (torch.arange(p.numel()).reshape(p.shape) + first).to(p.dtype)).sum().real
        for p in params
    )


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


def mine(*joined, of=hvd.global_process_set):
    """This rank's rows of each tensor."""
    return [own(each, of.rank(), of.size()) for each in joined]


def mean_over_ranks(value_of):
    """The mean of a function of the rank."""
    return sum(float(value_of(r)) for r in range(hvd.size())) / hvd.size()


def loss_of(net, x, y):
    return nn.functional.mse_loss(net(x), y)


def sgd(params, lr=1.0, names=None, **options):
    """At this rate a step takes the gradient itself from the parameter."""
    return hvd.DistributedOptimizer(torch.optim.SGD(params, lr=lr), names, **options)


class Twins:
    """Two equal models: all ranks train `net`, and this rank by itself trains `alone` on the joined
    batches."""

    def __init__(self, make=SGD, nets=None, dtype=torch.float64, **options):
        self.alone, self.net = nets or (model(dtype), model(dtype))
        self.reference = make(self.alone.parameters())
        self.optimizer = hvd.DistributedOptimizer(
            make(self.net.parameters()), self.net.named_parameters(), **options
        )
        self.process_set = options.get("process_set", hvd.global_process_set)
        self.factor = self.process_set.size() if options.get("op") is hvd.Sum else 1
        self.both = ((self.alone, self.reference), (self.net, self.optimizer))

    def zero_grad(self, **how):
        for _, optimizer in self.both:
            optimizer.zero_grad(**how)

    def backward(self, x, y):
        """The losses of both."""
        losses = (
            loss_of(self.alone, x, y) * self.factor,
            loss_of(self.net, *mine(x, y, of=self.process_set)),
        )
        for loss in losses:
            loss.backward()
        return losses

    def step(self, **tolerance):
        for _, optimizer in self.both:
            optimizer.step()
        assert_same_parameters(self.net, self.alone, **tolerance)

    def train(self, data):
        for x, y in data:
            self.zero_grad()
            self.backward(x, y)
            self.step()


def assert_same_parameters(net, other, rtol=1e-9, atol=1e-12):
    for (name, p), q in zip(net.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def assert_same_gradients(net, other):
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)


def assert_bitwise_equal_on_all_ranks(net):
    flat = torch.cat([p.detach().reshape(-1) for p in net.parameters()]).view(torch.int32)
    everyones = hvd.allgather(flat[None])
    assert (everyones == everyones[0]).all()


def same_on_all_ranks(value):
    """The value, which is the same on all ranks."""
    assert hvd.allgather_object(value) == [value] * hvd.size()
    return value


@contextlib.contextmanager
def log():
    """What the logger hvdlite is told inside."""
    texts, handler = [], logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("hvdlite").addHandler(handler)
    try:
        yield texts
    finally:
        logging.getLogger("hvdlite").removeHandler(handler)
