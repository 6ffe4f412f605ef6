"""Ranks whose models or optimizers differ: every rank raises the same error, with names in it."""

from itertools import pairwise

import pytest
import torch
from torch import nn

import hvdlite as hvd
from hvdlite.optimizer.checks.consistency import Model, difference
from tests.harness.on_ranks import on_ranks
from tests.optimizer.models import mean_over_ranks, same_on_all_ranks, sgd

pytestmark = [pytest.mark.ranks(2), pytest.mark.mpis("mpich")]


def stack(*widths, dtype=torch.float32):
    return nn.Sequential(*[nn.Linear(a, b, dtype=dtype) for a, b in pairwise(widths)])


def by_sgd(net=None, reverse=False, **options):
    net = net or stack(3, 4, 5)
    params = list(net.parameters())[:: -1 if reverse else 1]
    return net, sgd(params, names=net.named_parameters(), **options)


def by_adam():
    net = stack(3, 4, 5)
    return net, hvd.DistributedOptimizer(torch.optim.Adam(net.parameters()), net.named_parameters())


def frozen():
    net = stack(3, 4, 5)
    net[1].weight.requires_grad_(False)
    return by_sgd(net)


def transposed():
    net = stack(3, 4, 5)
    net[1].weight = nn.Parameter(torch.zeros(4, 5).t())
    return by_sgd(net)


def grouped():
    net = stack(3, 4, 5)
    return by_sgd(net, groups=[[net[0].bias]])


DIVIDE, BY = "gradient_predivide_factor", "compression=Compression"
WEIGHT, NONE, FP16 = "'1.weight' float32[5, 4]", "no such parameter", hvd.Compression.fp16
# What the last rank has, and what the error says of the others and of it.
CASES = {
    "shape": (lambda: by_sgd(stack(3, 4, 6)), WEIGHT, "'1.weight' float32[6, 4]"),
    "dtype": (
        lambda: by_sgd(stack(3, 4, 5, dtype=torch.float64)),
        *("parameter 0 differs: '0.weight' float32[4, 3]", "'0.weight' float64[4, 3]"),
    ),
    "one more": (lambda: by_sgd(stack(3, 4, 5, 6)), NONE, "'2.weight' float32[6, 5]"),
    "one fewer": (lambda: by_sgd(stack(3, 4)), f"parameter 2 differs: {WEIGHT}", NONE),
    "frozen": (frozen, f"{WEIGHT} with gradients", f"{WEIGHT} frozen"),
    "strides": (transposed, f"{WEIGHT} contiguous", f"{WEIGHT} with strides [1, 5]"),
    "order": (lambda: by_sgd(reverse=True), "'0.weight' float32[4, 3]", "'1.bias' float32[5]"),
    "group": (grouped, "'0.bias' float32[4] in no group", "'0.bias' float32[4] in group 0"),
    "op": (lambda: by_sgd(op=hvd.Sum), "op=Average", "op=Sum"),
    "predivide": (lambda: by_sgd(**{DIVIDE: 2}), f"{DIVIDE}=1.0", f"{DIVIDE}=2.0"),
    "compression": (lambda: by_sgd(compression=FP16), f"{BY}.none", f"{BY}.fp16"),
    "sparse": (lambda: by_sgd(sparse_as_dense=True), "as_dense=False", "sparse_as_dense=True"),
    "optimizer": (by_adam, "optimizer=SGD", "optimizer=Adam"),
}


@pytest.mark.wide_in(3)
@pytest.mark.parametrize("case", CASES)
@on_ranks(
    2, 3, hosts=("1,1",), knobs={"HVDLITE_BUCKET_BYTES": "64", "HVDLITE_FIRST_BUCKET_BYTES": "0"}
)
def test_every_rank_raises_the_same_error_that_names_the_parameter(case):
    rank, last = hvd.rank(), hvd.size() - 1
    make, of_others, of_last = CASES[case]
    net, optimizer = make() if rank == last else by_sgd()
    x = torch.ones(2, 3, dtype=next(net.parameters()).dtype)
    texts = []
    for _ in range(2):
        # Again and again, also where the optimizer's step begins the reduction.
        reduce = optimizer.step if texts and rank == 0 else net(x).sum().backward
        with pytest.raises(hvd.HorovodInternalError) as caught:
            reduce()
        texts.append(str(caught.value))
        optimizer.zero_grad()
    assert texts[0] == texts[1] == same_on_all_ranks(texts[0])
    others = "rank 0" if last == 1 else "ranks 0, 1"
    assert f"{of_others} on {others}, {of_last} on rank {last}" in texts[0]
    assert texts[0].startswith("DistributedOptimizer: ")
    assert "on every rank" in texts[0]
    # The engine goes on, and so does an optimizer that is the same everywhere.
    p = nn.Parameter(torch.zeros(1))
    optimizer = sgd([p])
    (p * (rank + 1)).sum().backward()
    assert p.grad.item() == mean_over_ranks(lambda r: r + 1)


@on_ranks(3)
def test_a_rank_that_has_left_is_named_and_nobody_waits_for_it():
    p = nn.Parameter(torch.zeros(1))
    if hvd.rank() > 0:
        optimizer = sgd([p])
        with pytest.raises(hvd.HorovodInternalError, match=r"rank 0 on .* has left"):
            p.sum().backward()
        optimizer.zero_grad()
    hvd.shutdown()
    hvd.init()


def described(*sizes):
    params = [(f"{'ab'[i]!r} float32[{size}]", "contiguous") for i, size in enumerate(sizes)]
    return Model((("op", "Sum"),), tuple(params))


def test_the_ranks_are_those_of_the_world_and_not_all_are_listed():
    models = [described(2), *[described(3)] * 10]
    text = difference(models, tuple(range(5, 16)))
    assert "on rank 5, 'a' float32[3] on ranks 6, 7, 8, 9, 10, 11, 12, 13 and 2 more;" in text
