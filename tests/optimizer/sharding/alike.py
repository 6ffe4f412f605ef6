"""Models that train with a sharded optimizer, beside copies with an unsharded one, in each rank."""

import copy

import torch

import hvdlite as hvd
from tests.optimizer.sharding.cuts import assert_same_state
from tests.optimizer.sharding.models import differences, loss_of, odd


def wrapped(make, net, **arguments):
    """make: an optimizer of a model."""
    return hvd.DistributedOptimizer(make(net), net.named_parameters(), **arguments)


class Pair:
    """A model with a sharded optimizer, `cut`, and its copy, `alone`, with an unsharded one."""

    def __init__(self, make, net=None, *, shard=True, shared=False, overlap=False, **arguments):
        self.shard = shard
        self.net = odd() if net is None else net
        self.alone = copy.deepcopy(self.net)
        if shared:
            hvd.share_parameters(self.net)
        self.plain = wrapped(make, self.alone, **arguments)
        overlapping = {"overlap_forward": self.net} if overlap else {}
        self.cut = wrapped(make, self.net, shard=shard, **overlapping, **arguments)
        self.both = ((self.alone, self.plain), (self.net, self.cut))

    def backward(self, step, loss=loss_of):
        """The losses of both. loss: of a model and the number of a step, on this rank."""
        losses = []
        for model, optimizer in self.both:
            optimizer.zero_grad()
            torch.manual_seed(100 * step + hvd.rank())  # of dropout
            losses.append(loss(model, step))
            losses[-1].backward()
        return losses

    def step(self):
        self.plain.step()
        self.cut.step()

    def compare(self, when=""):
        assert differences(self.net, self.alone) == [], when

    def train(self, steps, loss=loss_of):
        """Every step has the same bits."""
        for step in steps:
            self.backward(step, loss)
            if self.shard and self.cut._hvdlite_update.shards.elementwise:
                assert all(param.grad is None for param in self.net.parameters())
            self.step()
            self.compare(f"after step {step}")


def train_alike(make, net=None, loss=loss_of, *, steps=4, **ways):
    """Every step has the same bits. Returns both optimizers: the unsharded one first.

    ways: those of a `Pair`.
    """
    pair = Pair(make, net, **ways)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for _, each in pair.both]
    for step in range(steps):
        pair.train([step], loss)
        for scheduler in schedulers:
            scheduler.step()
    return pair.plain, pair.cut


def same_full(full, plain):
    """Whether rank 0 has what one process has, and the others nothing."""
    wanted = plain.state_dict() if hvd.rank() == 0 else {}
    assert full.keys() == wanted.keys()
    if wanted:
        assert full["param_groups"] == wanted["param_groups"]
        assert_same_state(full["state"], wanted["state"])
