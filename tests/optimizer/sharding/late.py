"""A model whose parameters are in flight on rank 0 while the other ranks have not sent them."""

import torch

import hvdlite as hvd
from tests.optimizer.sharding.alike import Pair
from tests.optimizer.sharding.models import batch


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1)


class Late(Pair):
    """A pair whose rank 0 makes a step before the others come to it."""

    def __init__(self, net=None, data=batch):
        super().__init__(sgd, net, overlap=True)
        self.data, self.held = data, list(self.net.parameters())
        # The first one finds out where the state is, which is collective.
        self.backward(0)
        self.cut.step()
        self.cut.wait_for_parameters()

    def backward(self, step):
        super().backward(step, lambda model, step: model(self.data(step)).square().mean())
        self.plain.step()

    def step(self, meanwhile=lambda: None):
        """meanwhile: called by rank 0, when its step has returned and the others have not begun."""
        if hvd.rank() == 0:
            self.cut.step()
            assert self.held_differ(), "rank 0 has what only the others can have computed"
            meanwhile()
            hvd.barrier()
        else:
            hvd.barrier()
            self.cut.step()

    def held_differ(self):
        pairs = zip(self.held, self.alone.parameters(), strict=True)
        return any(not torch.equal(held, expected) for held, expected in pairs)
