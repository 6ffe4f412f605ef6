"""Random parameters, cuts of them, and states, for tests without ranks."""

import itertools

import torch
from hypothesis import strategies as st

from hvdlite.optimizer.sharding.division import Division, Part
from hvdlite.optimizer.sharding.pieces import Whole, part_of_state, same
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
def cuts(draw, wholes):
    """Cuts all elements, one parameter after the other, at random places; the owners' turns are in
    a random order, so that one may have several parts of a parameter."""
    owners = draw(st.integers(1, 4))
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


def shardings(wholes, cut, **options):
    """Of all owners."""
    options = {"optimizer": "Adam", "group_sizes": (len(wholes),), **options}
    return [
        Sharding(wholes=wholes, division=Division(cut, frozenset(), own), owner=owner, **options)
        for owner, own in enumerate(cut)
    ]


def shards_of(full, cut, wholes):
    """The shards of all owners, cut from a state dict of one process."""
    return [
        shard_state_dict(each, full, states_of(full["state"], own, wholes))
        for each, own in zip(shardings(wholes, cut), cut, strict=True)
    ]


def states_of(full, parts, wholes):
    return [part_of_state(full.get(p.index, {}), wholes[p.index], p.begin, p.end) for p in parts]


def assert_same_state(states, wanted):
    assert states.keys() == wanted.keys()
    for index, state in states.items():
        assert state.keys() == wanted[index].keys()
        for key, value in state.items():
            expected = wanted[index][key]
            assert same(value, expected), (index, key, value, expected)
            if isinstance(value, torch.Tensor):
                assert Whole.of(key, value).steps == Whole.of(key, expected).steps
