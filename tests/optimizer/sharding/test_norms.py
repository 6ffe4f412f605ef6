"""Norms of gradients in parts, and clipping by them; torch's own clipping is kept away."""

import gc
import re

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn.utils import clip_grad
from torch.nn.utils import clip_grad_norm_ as imported_before
from torch.nn.utils import clip_grad_value_ as imported_before_too

from hvdlite.optimizer.sharding import clip_guard, norms
from hvdlite.optimizer.sharding.division import Part
from hvdlite.optimizer.sharding.memory import in_memory_order
from tests.optimizer.sharding import cuts

ORDERS = [2.0, 1.0, 3.0, 0.5, float("inf"), float("-inf"), 0.0]


def params_with_grads(shapes, dtype, without=()):
    params = [torch.nn.Parameter(param.detach().to(dtype)) for param in cuts.params_of(shapes)]
    for index, param in enumerate(params):
        generator = torch.Generator().manual_seed(index)
        if index not in without:
            param.grad = torch.randn(param.shape, generator=generator).to(dtype)
    return params


def clipped_by_owners(params, cut, max_norm, order):
    """The norm; the gradients of all owners are clipped in place."""
    grads = [
        [
            (part.index, in_memory_order(params[part.index].grad)[part.begin : part.end])
            for part in parts
            if params[part.index].grad is not None
        ]
        for parts in cut
    ]
    rows = torch.cat([norms.rows_of_norms(each, float(order)) for each in grads])
    total = norms.total_norm(rows, params, float(order))
    norms.scale_to(max_norm, total, [grad for own in grads for _, grad in own])
    return total


@settings(max_examples=100)
@given(
    st.data(),
    cuts.shapes,
    st.sampled_from(ORDERS),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.complex64]),
)
def test_the_norm_and_the_clipped_gradients_are_those_of_one_process(data, shapes, order, dtype):
    assume(order or not dtype.is_complex)  # torch warns there of its own doing
    without = data.draw(st.sets(st.integers(0, len(shapes) - 1)))
    params = params_with_grads(shapes, dtype, without)
    alone = params_with_grads(shapes, dtype, without)
    cut = data.draw(cuts.cuts(cuts.wholes_of(params)))
    found = clipped_by_owners(params, cut, 0.5, order)
    wanted = torch.nn.utils.clip_grad_norm_(alone, 0.5, order)
    tolerance = 8 * torch.finfo(dtype).eps
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=0.0)
    for param, other in zip(params, alone, strict=True):
        torch.testing.assert_close(param.grad, other.grad, rtol=2 * tolerance, atol=0.0)


@pytest.mark.parametrize("order", ORDERS)
def test_parameters_that_are_not_cut_give_the_very_norm_of_torch(order):
    shapes = [(3, 50), (1000,), (7,)]
    params, alone = (params_with_grads(shapes, torch.float32) for _ in range(2))
    wholes = cuts.wholes_of(params)
    cut = ((Part(1, 0, 1000),), (Part(0, 0, 150), Part(2, 0, wholes[2].numel)))
    found = clipped_by_owners(params, cut, 0.5, order)
    wanted = torch.nn.utils.clip_grad_norm_(alone, 0.5, order)
    assert torch.equal(found, wanted)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(params, alone, strict=True))


@pytest.mark.parametrize("order", [2.0, float("inf")])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e25])
def test_a_norm_that_is_not_finite_or_overflows_is_that_of_torch(order, value):
    params, alone = (params_with_grads([(6,), (4,)], torch.float32) for _ in range(2))
    params[0].grad[4] = alone[0].grad[4] = value
    found = clipped_by_owners(params, cuts.halves(cuts.wholes_of(params), 3), 1.0, order)
    wanted = torch.nn.utils.clip_grad_norm_(alone, 1.0, order)
    torch.testing.assert_close(found, wanted, equal_nan=True)
    torch.testing.assert_close(params[0].grad, alone[0].grad, equal_nan=True)


def test_without_gradients_the_norm_is_zero():
    assert norms.total_norm(norms.rows_of_norms([], 2.0), [], 2.0) == 0.0


class Owner:
    """What shards the gradients."""


@pytest.fixture
def guarded():
    param = torch.nn.Parameter(torch.ones(3))
    owner = Owner()
    clip_guard.guard([param], owner)
    yield param, owner
    clip_guard.release([param])


TORCHS = {
    "clip_grad_norm_": lambda p: torch.nn.utils.clip_grad_norm_([torch.zeros(1), p], 1.0),
    "of the module": lambda p: clip_grad.clip_grad_norm_((p,), 1.0),
    "one tensor": lambda p: torch.nn.utils.clip_grad_norm_(p, 1.0),
    "by keyword": lambda p: torch.nn.utils.clip_grad_norm_(max_norm=1.0, parameters=[p]),
    "a generator": lambda p: torch.nn.utils.clip_grad_norm_((q for q in [p]), 1.0),
    "imported before": lambda p: imported_before([p], 1.0),
    "value, imported before": lambda p: imported_before_too([p], 1.0),
    "clip_grad_value_": lambda p: torch.nn.utils.clip_grad_value_([p], 1.0),
    "clip_grads_with_norm_": lambda p: torch.nn.utils.clip_grads_with_norm_(
        [p], 1.0, torch.ones(())
    ),
}


@pytest.mark.parametrize("how", TORCHS)
def test_clipping_of_torch_refuses_sharded_parameters_and_names_ours(guarded, how):
    if how == "clip_grads_with_norm_" and not hasattr(torch.nn.utils, how):
        pytest.skip("this torch has no clip_grads_with_norm_")
    words = (
        "their gradients are sharded by DistributedOptimizer(shard=...), so .grad is None, and "
        "each rank has parts only. Call the optimizer's clip_grad_norm_(max_norm) instead"
    )
    with pytest.raises(RuntimeError, match=re.escape(words)):
        TORCHS[how](guarded[0])


def test_clipping_of_torch_works_for_other_parameters(guarded):
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.tensor([3.0, 0.0, 4.0])
    assert imported_before((p for p in [param]), 1.0) == 5.0
    torch.nn.utils.clip_grad_value_([param], 0.5)
    assert param.grad.tolist() == pytest.approx([0.5, 0.0, 0.5])
    with pytest.warns(UserWarning, match="empty generator"):
        torch.nn.utils.clip_grad_norm_((p for p in []), 1.0)


def test_parameters_are_given_back_when_their_optimizer_goes_or_they_do():
    param, other = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    owner = Owner()
    clip_guard.guard([param, other], owner)
    assert clip_guard.is_guarded(param)
    clip_guard.release([param])
    assert not clip_guard.is_guarded(param)
    clip_guard.guard([param], owner)
    before = len(clip_guard._owners)
    del owner, other
    gc.collect()
    assert len(clip_guard._owners) == before - 1
    assert not clip_guard.is_guarded(param)
    assert torch.nn.utils.clip_grad_norm_([param], 1.0) == 0.0
