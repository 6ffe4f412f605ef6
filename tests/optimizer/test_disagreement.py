"""Ranks whose models or optimizers differ: every rank raises the same error, with names in it."""

from itertools import pairwise

import pytest
import torch
from torch import nn

import hvdlite as hvd
from hvdlite.optimizer.checks.consistency import Model, difference
from tests.optimizer.models import mean_over_ranks

pytestmark = [pytest.mark.ranks(2), pytest.mark.mpis("mpich")]


def stack(*widths, dtype=torch.float32):
    return nn.Sequential(*[nn.Linear(a, b, dtype=dtype) for a, b in pairwise(widths)])


def the_same(net=None, **options):
    net = net or stack(3, 4, 5)
    return net, torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), options


def frozen(name):
    net, *rest = the_same()
    net.get_parameter(name).requires_grad_(False)
    return net, *rest


def transposed():
    net = stack(3, 4, 5)
    net[1].weight = nn.Parameter(torch.zeros(4, 5).t())
    return the_same(net)


def unordered():
    net = stack(3, 4, 5)
    params = list(net.parameters())[::-1]
    return net, torch.optim.SGD(params, lr=0.1), net.named_parameters(), {}


def grouped(lists):
    net = stack(3, 4, 5)
    return the_same(net, groups=[[net.get_parameter(name) for name in names] for names in lists])


def by_adam():
    net = stack(3, 4, 5)
    return net, torch.optim.Adam(net.parameters()), net.named_parameters(), {}


# What the last rank has, and what the error says of it and of the others.
CASES = {
    "shape": (
        lambda: the_same(stack(3, 4, 6)),
        "parameter 2 differs: '1.weight' float32[5, 4] on {others}, '1.weight' float32[6, 4] on",
    ),
    "dtype": (
        lambda: the_same(stack(3, 4, 5, dtype=torch.float64)),
        "parameter 0 differs: '0.weight' float32[4, 3] on {others}, '0.weight' float64[4, 3] on",
    ),
    "one more": (
        lambda: the_same(stack(3, 4, 5, 6)),
        "parameter 4 differs: no such parameter on {others}, '2.weight' float32[6, 5] on",
    ),
    "one fewer": (
        lambda: the_same(stack(3, 4)),
        "parameter 2 differs: '1.weight' float32[5, 4] on {others}, no such parameter on",
    ),
    "frozen": (
        lambda: frozen("1.weight"),
        "'1.weight' float32[5, 4] with gradients on {others}, '1.weight' float32[5, 4] frozen on",
    ),
    "strides": (
        transposed,
        "float32[5, 4] contiguous on {others}, '1.weight' float32[5, 4] with strides [1, 5] on",
    ),
    "order": (
        unordered,
        "parameter 0 differs: '0.weight' float32[4, 3] on {others}, '1.bias' float32[5] on",
    ),
    "group": (
        lambda: grouped([["0.bias"]]),
        "'0.bias' float32[4] in no group on {others}, '0.bias' float32[4] in group 0 on",
    ),
    "op": (lambda: the_same(op=hvd.Sum), "op=Average on {others}, op=Sum on"),
    "predivide": (
        lambda: the_same(gradient_predivide_factor=2),
        "gradient_predivide_factor=1.0 on {others}, gradient_predivide_factor=2.0 on",
    ),
    "compression": (
        lambda: the_same(compression=hvd.Compression.fp16),
        "compression=Compression.none on {others}, compression=Compression.fp16 on",
    ),
    "sparse": (
        lambda: the_same(sparse_as_dense=True),
        "sparse_as_dense=False on {others}, sparse_as_dense=True on",
    ),
    "optimizer": (by_adam, "optimizer=SGD on {others}, optimizer=Adam on"),
}


def differs(case):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    make, _ = CASES[case]
    net, optimizer, named, options = make() if rank == size - 1 else the_same()
    optimizer = hvd.DistributedOptimizer(optimizer, named, **options)
    x = torch.ones(2, 3, dtype=next(net.parameters()).dtype)
    texts = []
    for _ in range(2):
        # Again and again, also where the optimizer's step begins the reduction.
        reduce = optimizer.step if texts and rank == 0 else net(x).sum().backward
        with pytest.raises(hvd.HorovodInternalError) as caught:
            reduce()
        texts.append(str(caught.value))
        optimizer.zero_grad()
    assert texts[0] == texts[1]
    # The engine goes on, and so does an optimizer that is the same everywhere.
    p = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))
    (p * (rank + 1)).sum().backward()
    assert p.grad.item() == mean_over_ranks(lambda r: r + 1)
    return texts[0]


@pytest.mark.ranks(2, 3)
@pytest.mark.hosts("1,1")
@pytest.mark.wide_in(3)
@pytest.mark.parametrize("case", CASES)
def test_every_rank_raises_the_same_error_that_names_the_parameter(world, case):
    small = {"HVDLITE_BUCKET_BYTES": "64", "HVDLITE_FIRST_BUCKET_BYTES": "0"}
    texts = world.run(differs, case, knobs=small)
    assert len(set(texts)) == 1
    others = "rank 0" if world.size == 2 else "ranks 0, 1"
    assert CASES[case][1].format(others=others) + f" rank {world.size - 1}" in texts[0]
    assert texts[0].startswith("DistributedOptimizer: ")
    assert "on every rank" in texts[0]


def one_has_left():
    hvd.init()
    p = nn.Parameter(torch.zeros(1))
    rank = hvd.rank()
    if rank == 0:
        hvd.shutdown()
        text = None
    else:
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))
        with pytest.raises(hvd.HorovodInternalError, match=r"rank 0 on .* has left") as caught:
            p.sum().backward()
        optimizer.zero_grad()
        text = str(caught.value)
        hvd.shutdown()
    hvd.init()
    return text


@pytest.mark.ranks(3)
def test_a_rank_that_has_left_is_named_and_nobody_waits_for_it(world):
    texts = world.run(one_has_left)
    assert texts[1] == texts[2]


def described(*sizes):
    params = [(f"{'ab'[i]!r} float32[{size}]", "contiguous") for i, size in enumerate(sizes)]
    return Model((("op", "Sum"),), tuple(params))


def test_nothing_differs_between_models_that_are_alike():
    assert difference([described(2, 3), described(2, 3)], (0, 1)) is None
    assert described(2, 3).hash() == described(2, 3).hash()
    assert described(2, 3).hash() != described(3, 2).hash()
    assert difference([described(), described()], (0, 1)) is None


def test_the_ranks_are_those_of_the_world_and_not_all_are_listed():
    models = [described(2), *[described(3)] * 10]
    ranks = tuple(range(5, 16))
    text = difference(models, ranks)
    assert "on rank 5, 'a' float32[3] on ranks 6, 7, 8, 9, 10, 11, 12, 13 and 2 more;" in text
