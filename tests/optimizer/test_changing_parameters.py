"""Parameters are added, removed, unfrozen or changed between steps; users keep gradients."""

import warnings

import pytest
import torch
from torch import nn

import hvdlite as hvd
from tests.harness.on_ranks import on_ranks
from tests.optimizer.models import mean_over_ranks, sgd

pytestmark = [pytest.mark.ranks(2), pytest.mark.hosts("1,1")]


def parameters(count):
    return [nn.Parameter(torch.ones(2)) for _ in range(count)]


def backward(*params):
    """The gradients' mean is `mean_factor()`."""
    (sum(param.sum() for param in params) * (hvd.rank() + 1)).backward()


def mean_factor():
    return mean_over_ranks(lambda rank: rank + 1)


@on_ranks()
def test_a_parameter_that_was_thawed_added_or_put_in_the_place_of_one_is_reduced_at_once():
    a, b, c, d = parameters(4)
    b.requires_grad_(False)
    optimizer = sgd([a, b])
    assert not b.requires_grad
    backward(a)
    optimizer.step()
    optimizer.zero_grad()
    a.requires_grad_(False)
    b.requires_grad_(True)
    # Only the parameter without a hook gets a gradient.
    backward(b)
    assert b.grad.tolist() == [mean_factor()] * 2
    optimizer.step()
    optimizer.zero_grad()
    optimizer.add_param_group({"params": [c], "lr": 0.5})
    backward(c)
    assert c.grad.tolist() == [mean_factor()] * 2
    optimizer.step()
    assert a.tolist() == b.tolist() == [1 - mean_factor()] * 2
    assert c.tolist() == [1 - 0.5 * mean_factor()] * 2
    optimizer.param_groups[1]["params"] = [d]
    optimizer.zero_grad()
    backward(b, d)
    assert d.grad.tolist() == [mean_factor()] * 2


@pytest.mark.parametrize(("skips", "wrapped"), [(False, True), (True, True), (False, False)])
@on_ranks()
def test_a_group_may_be_added_between_backward_and_step(skips, wrapped):
    """Of which only rank 0 has a gradient already."""
    a, b = parameters(2)
    inner = torch.optim.SGD([a], lr=1.0)
    optimizer = hvd.DistributedOptimizer(inner)
    (a + b).sum().backward()
    if hvd.rank() > 0:
        b.grad = None
    optimizer.synchronize()
    (optimizer if wrapped else inner).add_param_group({"params": [b]})
    with optimizer.skip_synchronize() if skips else warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
    assert a.tolist() == [0.0] * 2
    assert b.tolist() == [1 - 1 / hvd.size()] * 2
    optimizer.zero_grad()
    backward(a, b)
    optimizer.step()
    assert a.tolist() == [-mean_factor()] * 2


@on_ranks()
def test_a_parameter_may_grow_and_change_its_dtype():
    (a,) = parameters(1)
    optimizer = sgd([a])
    for made in (torch.ones(3), torch.ones(3, dtype=torch.float64), torch.ones(3, 2).t()):
        a.data, a.grad = made.clone(), None
        backward(a)
        optimizer.step()
        assert a.dtype is made.dtype
        assert a.tolist() == (made - mean_factor()).tolist()


@on_ranks()
def test_a_parameter_that_a_newer_optimizer_has_too_is_reduced_once():
    a, shared, b = parameters(3)
    optimizers = [sgd([a, shared]), sgd([shared, b])]
    backward(a, shared, b)
    for optimizer in optimizers:
        optimizer.step()
    assert a.tolist() == b.tolist() == [1 - mean_factor()] * 2
    assert shared.tolist() == [1 - 2 * mean_factor()] * 2


@on_ranks()
def test_a_gradient_that_the_user_keeps_has_its_values_in_later_steps():
    a, b = parameters(2)
    optimizer = sgd([a, b])
    kept = []
    for step in range(4):
        loss = a.sum() * 10**step
        (loss if step == 2 else loss + b.sum() * 10**step).backward()
        kept += [grad for grad in (a.grad, b.grad) if grad is not None]
        optimizer.zero_grad()
    values = [1.0, 1.0, 10.0, 10.0, 100.0, 1000.0, 1000.0]
    assert [grad.tolist() for grad in kept] == [[value] * 2 for value in values]


@on_ranks()
def test_a_reduced_gradient_can_be_differentiated():
    (a,) = parameters(1)
    optimizer = sgd([a])
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*create_graph=True")
            ((a**3).sum() * (hvd.rank() + 1)).backward(create_graph=True)
        assert a.grad.tolist() == [3 * mean_factor()] * 2
        (second,) = torch.autograd.grad(a.grad.sum(), a)
        assert second.tolist() == [6.0 * (hvd.rank() + 1)] * 2
        optimizer.zero_grad()


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("steps", "while backward\\(\\) ran"),
        ("steps, zeros", "'parameter 1' was changed while backward\\(\\) ran"),
        ("clears", "the gradient of 'parameter 1' was removed while backward\\(\\) ran"),
        ("looks", None),
    ],
)
@on_ranks()
def test_steps_within_backward_are_an_error_on_every_rank(way, words, order, passes):
    """A hook of the script on `a` that does this, registered before hvdlite's or after it."""
    a, b = parameters(2)
    own = torch.optim.SGD([a], lr=1.0)
    seen = []

    def hook(param):
        if way in ("steps", "steps, zeros"):
            own.step()
            own.zero_grad(set_to_none=way == "steps")
        elif way == "clears":
            param.grad = None
        else:
            seen.append(param.grad.tolist())

    if order == "before":
        a.register_post_accumulate_grad_hook(hook)
    optimizer = sgd([b, a], backward_passes_per_step=passes, check_start=False)
    if order == "after":
        a.register_post_accumulate_grad_hook(hook)

    def step():
        for _ in range(passes):
            # The gradient of `b` comes first.
            backward(a.exp().log(), b)

    if words:
        with pytest.raises(RuntimeError, match=words):
            step()
        return
    step()
    assert len(seen) == passes
    optimizer.step()
    assert torch.allclose(a, 1 - torch.tensor(passes * mean_factor()))


@on_ranks()
def test_one_optimizer_per_parameter_makes_steps_within_backward():
    params = parameters(3)
    optimizers = {p: sgd([p]) for p in params}

    def hook(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in params:
        param.register_post_accumulate_grad_hook(hook)
    for _ in range(3):
        backward(*params)
    assert [param.tolist() for param in params] == [[1 - 3 * mean_factor()] * 2] * 3
    # The hooks keep it, and the parameters keep the hooks.
    optimizers.clear()
