"""Parameters are added, removed, unfrozen or changed between steps; users keep gradients."""

import warnings

import pytest
import torch
from torch import nn

import hvdlite as hvd
from tests.optimizer.models import mean_over_ranks

pytestmark = [pytest.mark.ranks(2), pytest.mark.hosts("1,1")]


def parameter(count=2):
    return nn.Parameter(torch.ones(count))


def mean_factor():
    """The mean of what each rank multiplies its loss with here, its number plus one."""
    return mean_over_ranks(lambda rank: rank + 1)


def thaws_another():
    hvd.init()
    a, b = parameter(), parameter()
    b.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a, b], lr=1.0))
    assert not b.requires_grad
    a.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    a.requires_grad_(False)
    b.requires_grad_(True)
    (b.sum() * (hvd.rank() + 1)).backward()
    assert b.grad.tolist() == [mean_factor()] * 2


def adds_a_group():
    hvd.init()
    a, b = parameter(), parameter()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a], lr=1.0))
    a.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.add_param_group({"params": [b], "lr": 0.5})
    (b.sum() * (hvd.rank() + 1)).backward()
    assert b.grad.tolist() == [mean_factor()] * 2
    optimizer.step()
    assert b.tolist() == [1 - 0.5 * mean_factor()] * 2


def adds_a_group_between_backward_and_step():
    """Of which only rank 0 has a gradient already."""
    hvd.init()
    for skips, wrapped in ((False, True), (True, True), (False, False)):
        a, b = parameter(), parameter()
        inner = torch.optim.SGD([a], lr=1.0)
        optimizer = hvd.DistributedOptimizer(inner)
        (a + b * (hvd.rank() == 0)).sum().backward()
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
        ((a + b).sum() * (hvd.rank() + 1)).backward()
        optimizer.step()
        assert a.tolist() == [-mean_factor()] * 2


def puts_another_in_its_place():
    hvd.init()
    body, head, other = parameter(), parameter(), parameter()
    groups = [{"params": [body]}, {"params": [head]}]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(groups, lr=1.0))
    (body + head).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.param_groups[1]["params"] = [other]
    ((body + other).sum() * (hvd.rank() + 1)).backward()
    assert other.grad.tolist() == [mean_factor()] * 2


def grows_and_changes_its_dtype():
    hvd.init()
    a = parameter()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a], lr=1.0))
    for made in (torch.ones(3), torch.ones(3, dtype=torch.float64), torch.ones(3, 2).t()):
        a.data, a.grad = made.clone(), None
        (a.sum() * (hvd.rank() + 1)).backward()
        optimizer.step()
        assert a.dtype is made.dtype
        assert a.tolist() == (made - mean_factor()).tolist()


def shares_with_a_newer_one():
    hvd.init()
    a, shared, b = parameter(), parameter(), parameter()
    former = hvd.DistributedOptimizer(torch.optim.SGD([a, shared], lr=1.0))
    newer = hvd.DistributedOptimizer(torch.optim.SGD([shared, b], lr=1.0))
    ((a + shared + b).sum() * (hvd.rank() + 1)).backward()
    for optimizer in (former, newer):
        optimizer.step()
    assert a.tolist() == b.tolist() == [1 - mean_factor()] * 2
    assert shared.tolist() == [1 - 2 * mean_factor()] * 2


def keeps_gradients():
    hvd.init()
    a, b = parameter(), parameter()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a, b], lr=1.0))
    kept = []
    for step in range(4):
        loss = a.sum() * 10**step
        if step != 2:
            loss = loss + b.sum() * 10**step
        loss.backward()
        kept.append((a.grad, b.grad))
        optimizer.zero_grad()
    values = [[None if grad is None else grad.tolist() for grad in pair] for pair in kept]
    assert values == [
        [[1.0] * 2, [1.0] * 2],
        [[10.0] * 2, [10.0] * 2],
        [[100.0] * 2, None],
        [[1000.0] * 2, [1000.0] * 2],
    ]


def differentiates_the_gradient():
    hvd.init()
    a = parameter()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a], lr=1.0))
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*create_graph=True")
            ((a**3).sum() * (hvd.rank() + 1)).backward(create_graph=True)
        assert a.grad.tolist() == [3 * mean_factor()] * 2
        (second,) = torch.autograd.grad(a.grad.sum(), a)
        assert second.tolist() == [6.0 * (hvd.rank() + 1)] * 2
        optimizer.zero_grad()


def steps_in_backward(way, order, passes):
    """A hook of the script on `a` that does this, registered before hvdlite's or after it. What
    backward raises."""
    hvd.init()
    a, b = parameter(), parameter()
    own = torch.optim.SGD([a], lr=1.0)

    def hook(param):
        if way == "steps":
            own.step()
            own.zero_grad()
        elif way == "steps, zeros":
            own.step()
            own.zero_grad(set_to_none=False)
        elif way == "clears":
            param.grad = None
        elif way == "looks":
            seen.append(param.grad.tolist())

    seen = []
    if order == "before":
        a.register_post_accumulate_grad_hook(hook)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([b, a], lr=1.0), backward_passes_per_step=passes, check_start=False
    )
    if order == "after":
        a.register_post_accumulate_grad_hook(hook)
    try:
        for _ in range(passes):
            # The gradient of `b` comes first.
            (torch.cat([a.exp().log(), b]).sum() * (hvd.rank() + 1)).backward()
    except RuntimeError as error:
        return str(error)
    assert len(seen) == passes
    optimizer.step()
    assert torch.allclose(a, 1 - torch.tensor(passes * mean_factor()))
    return None


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("steps", "DistributedOptimizer: {} while backward() ran"),
        ("steps, zeros", "DistributedOptimizer: 'parameter 1' was changed while backward() ran"),
        ("clears", "the gradient of 'parameter 1' was removed while backward() ran"),
        ("looks", None),
    ],
)
def test_steps_within_backward_are_an_error_on_every_rank(world, way, words, order, passes):
    for text in world.run(steps_in_backward, way, order, passes):
        if words is None:
            assert text is None
        else:
            assert words.partition("{}")[-1] in text


def steps_its_own_optimizer():
    """One distributed optimizer per parameter, whose steps are made within backward."""
    hvd.init()
    params = [parameter() for _ in range(3)]
    optimizers = {p: hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0)) for p in params}

    def hook(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in params:
        param.register_post_accumulate_grad_hook(hook)
    for _ in range(3):
        (sum(param.sum() for param in params) * (hvd.rank() + 1)).backward()
    for param in params:
        assert param.tolist() == [1 - 3 * mean_factor()] * 2
    # The hooks keep it, and the parameters keep the hooks.
    optimizers.clear()


def test_one_optimizer_per_parameter_makes_steps_within_backward(world):
    world.run(steps_its_own_optimizer)


@pytest.mark.parametrize(
    "case",
    [
        thaws_another,
        adds_a_group,
        adds_a_group_between_backward_and_step,
        puts_another_in_its_place,
        grows_and_changes_its_dtype,
        shares_with_a_newer_one,
        keeps_gradients,
        differentiates_the_gradient,
    ],
    ids=lambda case: case.__name__,
)
def test_gradients_are_reduced_all_the_same(world, case):
    world.run(case)
