"""Trains a model with a sharded optimizer beside a copy with an unsharded one, in each rank."""

import copy

import torch

import hvdlite as hvd


def train_alike(net, make, loss, *, shard=True, shared=False, steps=4, after=None):
    """Every step has the same bits. Returns both optimizers: the unsharded one first.

    make: an optimizer of a model. loss: of a model and the number of a step, on this rank.
    after: called with the optimizer and the number after each step.
    """
    alone = copy.deepcopy(net)
    if shared:
        hvd.share_parameters(net)
    plain = hvd.DistributedOptimizer(make(alone), alone.named_parameters())
    cut = hvd.DistributedOptimizer(make(net), net.named_parameters(), shard=shard)
    for step in range(steps):
        for model, optimizer in ((alone, plain), (net, cut)):
            optimizer.zero_grad()
            torch.manual_seed(100 * step + hvd.rank())  # of dropout
            loss(model, step).backward()
            optimizer.step()
            if after is not None:
                after(optimizer, step)
        assert differing(net, alone) == [], f"after step {step + 1}"
    return plain, cut


def differing(net, other):
    """The names of the parameters whose bits differ, with how much."""
    pairs = zip(net.named_parameters(), other.parameters(), strict=True)
    return [
        (name, (p - q).abs().max().item())
        for (name, p), q in pairs
        if not torch.equal(p, q) or p.isnan().any()
    ]


def same_states(cut, plain):
    """Rank 0 gets the state of one process. Collective."""
    full, wanted = cut.full_state_dict(), plain.state_dict()
    differ = []
    if hvd.rank() == 0:
        states, found = wanted["state"], full["state"]
        differ = sorted(found.keys() ^ states.keys())
        for index in found.keys() & states.keys():
            values = [
                {key: torch.as_tensor(value) for key, value in each[index].items()}
                for each in (found, states)
            ]
            if values[0].keys() != values[1].keys() or not all(
                torch.equal(value, values[1][key]) for key, value in values[0].items()
            ):
                differ.append(index)
    assert hvd.broadcast_object(differ) == []
