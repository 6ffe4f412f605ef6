"""Weights that some ranks lack, that are too small or come too late, and ranks that join."""

import math

import pytest
import torch
from torch import nn

import hvdlite as hvd
from tests.optimizer.models import (
    FEATURES,
    assert_same_parameters,
    loss_of,
    model,
)
from tests.optimizer.test_weights import OPTIMIZERS


def small_weights(passes):
    """The least that float16 takes, of gradients that it has in full; and less."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    generator = torch.Generator().manual_seed(8)
    grads = torch.rand(size, passes, 999, generator=generator) + 0.5
    weights = torch.rand(size, passes, 1, generator=generator) * 0.001 + 0.001
    texts = []
    for dtype, options in (
        (torch.float16, {}),
        (torch.float32, {"compression": hvd.Compression.fp16}),
    ):
        p = nn.Parameter(torch.zeros(999, dtype=dtype))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([p], lr=1.0), backward_passes_per_step=passes, **options
        )

        def backward(scale, p=p, optimizer=optimizer, dtype=dtype):
            optimizer.zero_grad()
            for grad, weight in zip(grads[rank].to(dtype), weights[rank], strict=True):
                optimizer.set_weight(weight * scale)
                (p * grad).sum().backward()

        backward(1)
        mean = (grads * weights).sum((0, 1)) / weights.sum()
        torch.testing.assert_close(p.grad.float(), mean, rtol=4e-3, atol=0.0)
        with pytest.raises(hvd.HorovodInternalError) as caught:
            backward(0.2 / passes)
        assert not p.any()
        texts.append(str(caught.value).partition(":")[2])
        backward(1)
        torch.testing.assert_close(p.grad.float(), mean, rtol=4e-3, atol=0.0)
    return texts


@pytest.mark.ranks(2)
@pytest.mark.hosts("1,1")
@pytest.mark.parametrize("passes", [1, 2])
def test_weights_that_are_too_small_for_float16_are_an_error_on_all_ranks(world, passes):
    found = world.run(small_weights, passes)
    assert len({text for texts in found for text in texts}) == 1
    assert "the largest weight of all ranks is 0.000" in found[0][0]
    assert "set_weight(len(batch) / batch_size), or use Compression.bf16" in found[0][0]


def joins(weighted):
    """Rank r has r + 1 batches: in the end fewer and fewer ranks take part."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    alone, net = model(), model()
    reference = OPTIMIZERS["momentum"](alone.parameters())
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["momentum"](net.parameters()))
    for epoch in range(2):
        for step in range(size):
            generator = torch.Generator().manual_seed(10 * epoch + step)
            parts = []
            for r in range(step, size):
                rows = 2 + (r + step) % 3
                x = torch.randn(rows, FEATURES, dtype=torch.float64, generator=generator)
                parts.append((x, x.sin().sum(1, keepdim=True)))
            reference.zero_grad()
            if weighted:
                x, y = (torch.cat(each) for each in zip(*parts, strict=True))
                loss_of(alone, x, y).backward()
            else:
                # As Horovod: the mean divides by the number of all ranks.
                (sum(loss_of(alone, *part) for part in parts) / size).backward()
            reference.step()
            if step <= rank:
                own = parts[rank - step]
                optimizer.zero_grad()
                if weighted:
                    optimizer.set_weight(len(own[0]))
                loss_of(net, *own).backward()
                optimizer.step()
                assert_same_parameters(net, alone)
        last = hvd.join()
        assert last == size - 1
        hvd.broadcast_parameters(net.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
        assert_same_parameters(net, alone)


@pytest.mark.ranks(2, 3)
@pytest.mark.hosts("1,1")
@pytest.mark.parametrize("weighted", [True, False])
def test_with_weights_a_rank_that_has_joined_does_not_count_in_the_mean(world, weighted):
    world.run(joins, weighted)


def one_forgets(kind, size_of_first):
    hvd.init()
    rank = hvd.rank()
    p = nn.Parameter(torch.zeros(4, 2))
    optimizer = hvd.DistributedOptimizer(kind([p], lr=1.0))
    sparse = kind is torch.optim.SparseAdam

    def backward(weight):
        optimizer.zero_grad()
        if weight is not None:
            optimizer.set_weight(weight)
        nn.functional.embedding(torch.arange(4), p, sparse=sparse).sum().backward()

    backward(1)
    optimizer.step()
    with pytest.raises(hvd.HorovodInternalError) as caught:
        backward(3 if rank == size_of_first else None)
    # All can go on.
    backward(2)
    assert (p.grad.to_dense() == 1).all()
    backward(None)
    assert (p.grad.to_dense() == 1).all()
    return str(caught.value)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.SparseAdam])
@pytest.mark.parametrize("who", [0, 1])
def test_if_only_some_ranks_give_a_weight_all_get_the_error(world, kind, who):
    others = ", ".join(str(rank) for rank in range(3) if rank != who)
    for text in world.run(one_forgets, kind, who):
        assert f"optimizer.set_weight(n) on rank {who}" in text
        assert f"no weight on ranks {others}" in text
        assert "Call optimizer.set_weight(n) on every rank before backward()" in text


def forgotten_after_the_step():
    hvd.init()
    rank = hvd.rank()
    p = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))

    def grad():
        optimizer.zero_grad()
        (p * (1.0 + 2.0 * rank)).sum().backward()
        return p.grad.item()

    optimizer.set_weight(3 - 2 * rank)
    assert grad() == 1.5
    # `zero_grad` after a backward ends what the weight is for.
    assert grad() == 2.0
    optimizer.zero_grad()
    optimizer.set_weight(0)
    assert grad() == 0.0
    optimizer.step()
    assert grad() == 2.0
    # The gradient of `step` without a backward counts with the weight too.
    optimizer.zero_grad()
    optimizer.set_weight(3 - 2 * rank)
    p.grad = torch.tensor([1.0 + 2.0 * rank])
    optimizer.synchronize()
    assert p.grad.item() == 1.5


@pytest.mark.ranks(2)
def test_a_weight_counts_until_the_step(world):
    world.run(forgotten_after_the_step)


def bad_calls():
    hvd.init()
    p = nn.Parameter(torch.zeros(2))

    def distributed(**options):
        return hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), **options)

    optimizer = distributed()
    for bad in (-1, math.nan, math.inf, True, "3", None, torch.ones(2), torch.tensor(True), 1e-10):
        with pytest.raises(ValueError, match=r"^set_weight\(.*expected"):
            optimizer.set_weight(bad)
    with pytest.raises(ValueError, match="expected 0, or a number from 1e-09 to 1e"):
        optimizer.set_weight(10**400)
    p.sum().backward()
    with pytest.raises(RuntimeError, match=r"reduced already; call it before\s+backward"):
        optimizer.set_weight(1)
    optimizer.zero_grad()
    with optimizer.no_sync():
        p.sum().backward()
        with pytest.raises(RuntimeError, match="pass of this step had no weight"):
            optimizer.set_weight(1)
        optimizer.zero_grad()
        optimizer.set_weight(1)
        p.sum().backward()
    with optimizer.skip_synchronize(), pytest.raises(RuntimeError, match="are not reduced"):
        optimizer.step()
    for op in (hvd.Sum, hvd.Adasum):
        with pytest.raises(ValueError, match="needs op=Average"):
            distributed(op=op).set_weight(1)
    half = distributed(compression=hvd.Compression.fp16)
    with pytest.raises(ValueError, match=r"travel as float16.*fractions of the largest batch"):
        half.set_weight(2)
    half.set_weight(0.5)


@pytest.mark.ranks(2)
def test_bad_and_late_calls_are_errors_that_say_what_to_do(world):
    world.run(bad_calls)
