"""In deterministic mode gradients have the bits of a tree over the ranks, on any layout."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hvdlite as hvd
from tests.core import sum_tree
from tests.distributed.default_group import in_a_group

KNOBS = {"HVDLITE_DETERMINISTIC": "1", "HVDLITE_BUCKET_BYTES": "6000"}
SIZES = (7, 4000, 333)
WEIGHTS = (3.0, 0.7, 11.0, 2.0)


def gradients(rank, dtype):
    return [sum_tree.draw(rank, size, dtype) for size in SIZES]


def expected(dtype, *factors):
    everyones = zip(*(gradients(rank, dtype) for rank in range(hvd.size())), strict=True)
    return [sum_tree.reduced(given, "Average", *factors) for given in everyones]


def reduced(dtype, weight=None, **arguments):
    """What a step of SGD takes from zeros."""
    params = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in SIZES]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), **arguments)
    for _ in range(2):  # the first round of a sharded optimizer is whole
        for param in params:
            param.data.zero_()
        if weight is not None:
            optimizer.set_weight(weight)
        terms = zip(params, gradients(hvd.rank(), dtype), strict=True)
        sum((param * grad).sum() for param, grad in terms).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [-param.data for param in params]


def equal(got, right):
    return all(torch.equal(a, b) for a, b in zip(got, right, strict=True))


def reduces_along_the_tree():
    hvd.init()
    wrong = []
    for dtype in (torch.float32, torch.bfloat16):
        for arguments in ({}, {"shard": True}, {"shard": "host"}):
            if not equal(reduced(dtype, **arguments), expected(dtype)):
                wrong.append(f"{dtype} {arguments}")
        if not equal(reduced(dtype, gradient_predivide_factor=3.0), expected(dtype, 1 / 3.0, 3.0)):
            wrong.append(f"{dtype} predivided")
    weights = WEIGHTS[: hvd.size()]
    products = [
        [grad * weight for grad in gradients(rank, torch.float32)]
        for rank, weight in enumerate(weights)
    ]
    right = [
        sum_tree.reduced(given, "Average") * (hvd.size() / math.fsum(weights))
        for given in zip(*products, strict=True)
    ]
    if not equal(reduced(torch.float32, weights[hvd.rank()]), right):
        wrong.append("weighted")
    return wrong


@pytest.mark.ranks(4)
@pytest.mark.hosts("2,2", "1,2,1")
@pytest.mark.above_mpi
def test_gradients_have_the_bits_of_the_tree(world):
    assert world.run(reduces_along_the_tree, knobs=KNOBS) == [[]] * 4


@in_a_group
def adds_along_the_tree(rank, size):
    wrong = []
    for dtype in (torch.float32, torch.bfloat16):
        given = [sum_tree.draw(member, 3000, dtype) for member in range(size)]
        x = given[rank].clone()
        dist.all_reduce(x)
        if not torch.equal(x, sum_tree.reduced(given, "Sum")):
            wrong.append(str(dtype))
    return wrong


@pytest.mark.hosts("2,2", "1,2,1")
@pytest.mark.wide_in("2,2")
@pytest.mark.above_mpi
def test_the_backend_of_torch_distributed_has_them_too(world, tmp_path):
    assert world.run(adds_along_the_tree, tmp_path, knobs=KNOBS) == [[]] * 4
