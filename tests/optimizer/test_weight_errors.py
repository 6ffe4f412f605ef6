"""Weights that some ranks lack, that are too small or come too late, and ranks that join."""

import math

import pytest
import torch
from torch import nn

import hvdlite as hvd
from tests.harness.on_ranks import on_ranks
from tests.optimizer.models import (
    OPTIMIZERS,
    Twins,
    assert_same_parameters,
    loss_of,
    same_on_all_ranks,
    sgd,
)
from tests.optimizer.test_weights import parts_of

pytestmark = pytest.mark.ranks(2)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float16, {}), (torch.float32, {"compression": hvd.Compression.fp16})],
)
@on_ranks(2, hosts=("1,1",))
def test_weights_that_are_too_small_for_float16_are_an_error_on_all_ranks(dtype, options, passes):
    """The least that float16 takes, of gradients that it has in full; and less."""
    generator = torch.Generator().manual_seed(8)
    grads = torch.rand(hvd.size(), passes, 999, generator=generator) + 0.5
    weights = torch.rand(hvd.size(), passes, 1, generator=generator) * 0.001 + 0.001
    mean = (grads * weights).sum((0, 1)) / weights.sum()
    p = nn.Parameter(torch.zeros(999, dtype=dtype))
    optimizer = sgd([p], backward_passes_per_step=passes, **options)

    def backward(scale):
        optimizer.zero_grad()
        for grad, weight in zip(grads[hvd.rank()].to(dtype), weights[hvd.rank()], strict=True):
            optimizer.set_weight(weight * scale)
            (p * grad).sum().backward()

    backward(1)
    torch.testing.assert_close(p.grad.float(), mean, rtol=4e-3, atol=0.0)
    with pytest.raises(hvd.HorovodInternalError) as caught:
        backward(0.2 / passes)
    text = same_on_all_ranks(str(caught.value))
    assert "the largest weight of all ranks is 0.000" in text
    assert "set_weight(len(batch) / batch_size), or use Compression.bf16" in text
    backward(1)
    torch.testing.assert_close(p.grad.float(), mean, rtol=4e-3, atol=0.0)


@on_ranks(2, 3, hosts=("1,1",))
def test_with_weights_a_rank_that_has_joined_does_not_count_in_the_mean():
    """Rank r has r + 1 batches: in the end fewer and fewer ranks take part."""
    rank, size = hvd.rank(), hvd.size()
    twins = Twins(OPTIMIZERS["momentum"])
    for epoch in range(2):
        for step in range(size):
            counts = [2 + (r + step) % 3 for r in range(step, size)]
            parts = parts_of(counts, 10 * epoch + step)
            twins.reference.zero_grad()
            joined = (torch.cat(each) for each in zip(*parts, strict=True))
            loss_of(twins.alone, *joined).backward()
            twins.reference.step()
            if step <= rank:
                own = parts[rank - step]
                twins.optimizer.zero_grad()
                twins.optimizer.set_weight(len(own[0]))
                loss_of(twins.net, *own).backward()
                twins.optimizer.step()
                assert_same_parameters(twins.net, twins.alone)
        last = hvd.join()
        assert last == size - 1
        hvd.broadcast_parameters(twins.net.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(twins.optimizer, root_rank=last)
        assert_same_parameters(twins.net, twins.alone)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.SparseAdam])
@pytest.mark.parametrize("who", [0, 1])
@on_ranks(3)
def test_if_only_some_ranks_give_a_weight_all_get_the_error(kind, who):
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
        backward(3 if hvd.rank() == who else None)
    text = same_on_all_ranks(str(caught.value))
    assert f"optimizer.set_weight(n) on rank {who}" in text
    assert f"no weight on ranks {1 - who}, 2" in text
    assert "Call optimizer.set_weight(n) on every rank before backward()" in text
    for weight in (2, None):  # all can go on
        backward(weight)
        assert (p.grad.to_dense() == 1).all()


@on_ranks()
def test_a_weight_counts_until_the_step():
    rank = hvd.rank()
    p = nn.Parameter(torch.zeros(1))
    optimizer = sgd([p])

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


@on_ranks()
def test_bad_and_late_calls_are_errors_that_say_what_to_do():
    p = nn.Parameter(torch.zeros(2))
    optimizer = sgd([p])
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
            sgd([p], op=op).set_weight(1)
    half = sgd([p], compression=hvd.Compression.fp16)
    with pytest.raises(ValueError, match=r"travel as float16.*fractions of the largest batch"):
        half.set_weight(2)
    half.set_weight(0.5)
