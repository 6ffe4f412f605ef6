"""In deterministic mode gradients have the bits of a tree over the ranks, on any layout."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hvdlite as hvd
from tests.core import sum_tree
from tests.distributed.default_group import in_a_group
from tests.harness.on_ranks import on_ranks
from tests.optimizer.models import sgd

KNOBS = {"HVDLITE_DETERMINISTIC": "1", "HVDLITE_BUCKET_BYTES": "6000"}
SIZES = (7, 4000, 333)
WEIGHTS = (3.0, 0.7, 11.0, 2.0)


def reduced(size, dtype, predivide=1.0, weights=None):
    given = [sum_tree.draw(rank, size, dtype) for rank in range(hvd.size())]
    if weights is None:
        return sum_tree.reduced(given, "Average", 1 / predivide, predivide)
    products = [grad * weight for grad, weight in zip(given, weights, strict=True)]
    return sum_tree.reduced(products, "Average") * (hvd.size() / math.fsum(weights))


@pytest.mark.wide_in("2,2", "1,2,1")
@pytest.mark.parametrize(
    ("options", "weighted"),
    [
        ({}, False),
        ({"shard": True}, False),
        ({"shard": "host"}, False),
        ({"gradient_predivide_factor": 3.0}, False),
        ({}, True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.above_mpi
@on_ranks(3, hosts=("2,1", "2,2", "1,2,1"), knobs=KNOBS)
def test_gradients_have_the_bits_of_the_tree(options, weighted, dtype):
    weights = WEIGHTS[: hvd.size()] if weighted else None
    params = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in SIZES]
    optimizer = sgd(params, **options)
    for _ in range(2):  # the first round of a sharded optimizer is whole
        for param in params:
            param.data.zero_()
        if weights:
            optimizer.set_weight(weights[hvd.rank()])
        sum((p * sum_tree.draw(hvd.rank(), len(p), dtype)).sum() for p in params).backward()
        optimizer.step()
        optimizer.zero_grad()
    predivide = options.get("gradient_predivide_factor", 1.0)
    for param in params:
        assert torch.equal(-param, reduced(len(param), dtype, predivide, weights))


@in_a_group
def adds_along_the_tree(rank, size):
    for dtype in (torch.float32, torch.bfloat16):
        given = [sum_tree.draw(member, 3000, dtype) for member in range(size)]
        x = given[rank].clone()
        dist.all_reduce(x)
        assert torch.equal(x, sum_tree.reduced(given, "Sum")), dtype


@pytest.mark.hosts("2,2", "1,2,1")
@pytest.mark.wide_in("2,2")
@pytest.mark.above_mpi
def test_the_backend_of_torch_distributed_has_them_too(world, tmp_path):
    world.run(adds_along_the_tree, tmp_path, knobs=KNOBS)
