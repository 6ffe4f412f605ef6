"""Random parameters, cuts of them, and states, for tests without ranks."""

import itertools

import torch
from hypothesis import strategies as st

from hvdlite.optimizer.sharding.cut import Part
from hvdlite.optimizer.sharding.pieces import Whole, part_of_state
from hvdlite.optimizer.sharding.state_dicts import Sharding, shard_state_dict

shapes = st.lists(st.lists(st.integers(1, 4), max_size=3).map(tuple), min_size=1, max_size=4)


def params_of(shapes, transposed=()):
    """Parameters of these shapes; the memory of some is in the reverse order of dimensions."""
    params = []
    for index, shape in enumerate(shapes):
        is_transposed = index in transposed
        values = torch.arange(float(torch.Size(shape).numel())) + 100 * index
        values = values.reshape(shape[::-1] if is_transposed else shape)
        values = values.permute(tuple(reversed(range(values.dim())))) if is_transposed else values
        params.append(torch.nn.Parameter(values))
    return params


def wholes_of(params):
    return tuple(Whole.of(f"p{index}", param) for index, param in enumerate(params))


@st.composite
def cuts(draw, wholes, owners=None):
    """Cuts all elements, one parameter after the other, at random places; the owners' turns are in
    a random order, so that one may have several parts of a parameter."""
    owners = draw(st.integers(1, 4)) if owners is None else owners
    parts = [[] for _ in range(owners)]
    for index, whole in enumerate(wholes):
        inside = draw(st.sets(st.integers(0, whole.numel), max_size=3))
        places = sorted({0, whole.numel} | inside)
        for begin, end in itertools.pairwise(places):
            parts[draw(st.integers(0, owners - 1))].append(Part(index, begin, end))
    return tuple(map(tuple, parts))


def halves(wholes, owners):
    """Each parameter in as many parts as there are owners."""
    parts = [[] for _ in range(owners)]
    for index, whole in enumerate(wholes):
        places = [whole.numel * owner // owners for owner in range(owners + 1)]
        for owner in range(owners):
            if places[owner] < places[owner + 1]:
                parts[owner].append(Part(index, places[owner], places[owner + 1]))
    return tuple(map(tuple, parts))


def trained(params, make, steps=2):
    """A plain optimizer after some steps with different gradients for each element."""
    optimizer = make(params)
    for step in range(steps):
        for index, param in enumerate(params):
            generator = torch.Generator().manual_seed(10 * step + index)
            param.grad = torch.empty_like(param.detach())  # with the strides that backward gives it
            param.grad.copy_(torch.randn(param.shape, generator=generator))
        optimizer.step()
    return optimizer


def shards_of(full, cut, wholes, optimizer="Adam", group_sizes=None):
    """The shards of all owners, cut from a state dict of one process."""
    group_sizes = group_sizes or (len(wholes),)
    result = []
    for owner, parts in enumerate(cut):
        sharding = Sharding(optimizer, wholes, group_sizes, cut, owner)
        states = [
            part_of_state(full["state"].get(p.index, {}), wholes[p.index], p.begin, p.end)
            for p in parts
        ]
        result.append(shard_state_dict(sharding, full["param_groups"], states))
    return result
