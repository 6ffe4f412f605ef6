"""A model whose parameters are on the way on rank 0 while the other ranks have not sent them."""

import torch

import hvdlite as hvd
from tests.optimizer.sharding.models import batch, odd


class Late:
    """A model whose rank 0 makes a step before the others come to it."""

    def __init__(self, kind=torch.optim.SGD, make=odd, data=batch, prepare=None, **arguments):
        hvd.init()
        self.alone, self.net, self.data = make(), make(), data
        if prepare is not None:
            prepare(self.net)
        self.plain = hvd.DistributedOptimizer(kind(self.alone.parameters(), lr=0.1))
        arguments.setdefault("overlap_forward", self.net)
        self.cut = hvd.DistributedOptimizer(
            kind(self.net.parameters(), lr=0.1), shard=True, **arguments
        )
        self.held = list(self.net.parameters())
        # The first one finds out where the state is, which is collective.
        self.backward()
        self.cut.step()
        self.cut.wait_for_parameters()

    def backward(self, step=0):
        for each, optimizer in ((self.alone, self.plain), (self.net, self.cut)):
            optimizer.zero_grad()
            each(self.data(step)).square().mean().backward()
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
