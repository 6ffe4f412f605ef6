"""Several backwards in a step, one inside another, one for two optimizers, and one that raises."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hvdlite as hvd
from tests.optimizer.models import (
    assert_bitwise_equal_on_all_ranks,
    assert_same_parameters,
    batches,
    loss_of,
    mean_over_ranks,
    model,
    own,
)

pytestmark = [pytest.mark.ranks(2), pytest.mark.mpis("mpich")]


def backward_in_parts():
    hvd.init()
    rank = hvd.rank()
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a, b], lr=1.0), op=hvd.Sum)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        (a * (rank + 1)).sum().backward()
        first = a.grad.clone()
        (b * 2).sum().backward()
        assert torch.equal(a.grad, first), "reduced once"
        assert first.tolist() == [sum(r + 1.0 for r in range(hvd.size()))] * 2
        assert b.grad.tolist() == [2.0 * hvd.size()] * 2
        optimizer.step()


@pytest.mark.ranks(1, 3)
def test_a_parameter_may_get_its_gradient_from_a_later_backward_of_the_step(world):
    world.run(backward_in_parts)


def second_backward():
    hvd.init()
    p = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), [("layer.weight", p)])
    p.sum().backward()
    for retry in (lambda: p.sum().backward(), lambda: no_sync_backward()):

        def no_sync_backward():
            with optimizer.no_sync():
                p.sum().backward()

        with pytest.raises(
            RuntimeError, match=r"'layer.weight'.*backward_passes_per_step.*no_sync"
        ):
            retry()
    optimizer.zero_grad()
    p.sum().backward()
    optimizer.step()
    p.grad = None
    p.sum().backward()
    # A discarded gradient may come again, as where GradScaler has skipped the step.
    p.grad = None
    p.sum().backward()
    assert p.grad.tolist() == [1.0, 1.0]


def test_a_second_backward_before_step_is_an_error_that_says_what_to_do(world):
    world.run(second_backward)


def two_passes_of_one_loop():
    """Two losses of one network before each step, as a discriminator has."""
    hvd.init()
    p = nn.Parameter(torch.zeros(2))
    named = [("discriminator.weight", p)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([p], lr=1.0), named, backward_passes_per_step=2
    )
    optimizer.zero_grad()
    for _ in range(2):
        p.sum().backward()
    with pytest.raises(RuntimeError) as caught:
        p.sum().backward()
    return str(caught.value)


def test_a_pass_more_than_the_number_given_is_an_error_that_does_not_advise_to_give_one(world):
    for text in world.run(two_passes_of_one_loop):
        assert "'discriminator.weight'" in text
        assert "backward_passes_per_step=2 reduces after every 2 backward passes" in text
        assert "this one is one more before step()" in text
        assert "pass backward_passes_per_step to" not in text


def adversaries():
    hvd.init()
    torch.manual_seed(0)
    generator, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    of_generator = hvd.DistributedOptimizer(torch.optim.SGD(generator.parameters(), lr=0.1))
    of_critic = hvd.DistributedOptimizer(torch.optim.SGD(critic.parameters(), lr=0.1))
    for _ in range(3):
        of_generator.zero_grad()
        critic(generator(torch.randn(4, 2))).mean().backward()
        of_generator.step()
        of_critic.zero_grad()
        critic(generator(torch.randn(4, 2)).detach()).mean().backward()
        of_critic.step()
    assert_bitwise_equal_on_all_ranks(generator)
    assert_bitwise_equal_on_all_ranks(critic)


def test_two_optimizers_may_share_a_backward(world):
    world.run(adversaries)


def passes():
    hvd.init()
    rank = hvd.rank()
    p = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), backward_passes_per_step=2)
    (p * (rank + 1)).backward()
    assert p.grad.item() == rank + 1, "not reduced yet"
    (p * 10).backward()
    assert p.grad.item() == 10 + mean_over_ranks(lambda r: r + 1)
    optimizer.step()
    optimizer.zero_grad()
    (p * (rank + 1)).backward()
    optimizer.step()
    assert p.grad.item() == mean_over_ranks(lambda r: r + 1), "reduced by step"
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(1)
    (p * (rank + 1)).backward()
    assert p.grad.item() == mean_over_ranks(lambda r: r + 1)
    with pytest.raises(ValueError, match="at least 1"):
        optimizer.set_backward_passes_per_step(0)


def test_every_nth_backward_communicates_and_step_sees_to_the_rest(world):
    world.run(passes)


def steps_too_early(how):
    hvd.init()
    p = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), backward_passes_per_step=3)
    text = r"step\(\) after 1 of backward_passes_per_step=3 backward passes.* once every 3 backward"
    for batch in range(7):
        if how != "accumulates" or batch % 3 == 0:
            optimizer.zero_grad()
        p.sum().backward()
        if batch % 3 < 2 and batch < 6 and how != "steps after each":
            continue
        if how == "accumulates" or batch > 3:
            # The last step is an epoch's rest.
            optimizer.step()
        elif how == "steps after each" and batch > 0:
            optimizer.step()
        else:
            with pytest.warns(UserWarning, match=text):
                optimizer.step()
    if how == "accumulates":
        assert p.item() == -7


@pytest.mark.parametrize("how", ["accumulates", "steps after each", "zeroes gradients after each"])
def test_a_first_step_before_the_nth_backward_says_so_once(world, how):
    world.run(steps_too_early, how)


def checkpoints(reentrant, passes):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    alone, net = model(), model()
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), backward_passes_per_step=passes
    )
    for step, (x, y) in enumerate(batches(4 * passes, 2, size)):
        loss_of(alone, x, y).backward()
        hidden = own(x, rank, size).requires_grad_()
        for part in (net[:2], net[2:4]):
            hidden = checkpoint(part, hidden, use_reentrant=reentrant)
        loss_of(net[4], hidden, own(y, rank, size)).backward()
        if step % passes == passes - 1:
            for p, q in zip(net.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)
            for each in (reference, optimizer):
                each.step()
                each.zero_grad()
        else:
            assert rank == 0 or not torch.equal(net[0].weight.grad, alone[0].weight.grad)
    assert_same_parameters(net, alone)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_parts_of_a_model_are_reduced_alike(world, reentrant, passes):
    world.run(checkpoints, reentrant, passes)


def passes_changed_on_the_way():
    hvd.init()
    rank = hvd.rank()
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), backward_passes_per_step=3)
    assert optimizer.backward_passes_per_step == 3
    mean = mean_over_ranks(lambda r: r + 1)
    (p * (rank + 1)).backward()
    # Counted from now: two more, and what came before is among them.
    optimizer.set_backward_passes_per_step(2)
    (p * (rank + 1)).backward()
    assert p.grad.item() == 2 * (rank + 1), "not reduced yet"
    (p * (rank + 1)).backward()
    assert p.grad.item() == 3 * mean
    optimizer.step()
    for passes in (1, 4, 2):
        optimizer.zero_grad()
        optimizer.set_backward_passes_per_step(passes)
        assert optimizer.backward_passes_per_step == passes
        for _ in range(passes):
            (p * (rank + 1)).backward()
        assert p.grad.item() == passes * mean
        optimizer.step()
    assert p.item() == -(3 + 1 + 4 + 2) * mean


@pytest.mark.ranks(2, 3)
def test_the_passes_per_step_may_change_on_the_way(world):
    world.run(passes_changed_on_the_way)


def first_gradients_in_another_order():
    hvd.init()
    rank = hvd.rank()
    params = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0)) for p in params]
    for step in range(4):
        # Backward comes first to what was computed last.
        order = (0, 1) if (rank + step) % 2 else (1, 0)
        products = {i: params[i] * (rank + 1) * (i + 1) for i in order}
        (products[0] + products[1]).backward()
        for i, optimizer in enumerate(optimizers):
            assert params[i].grad.item() == (i + 1) * mean_over_ranks(lambda r: r + 1)
            optimizer.step()
            optimizer.zero_grad()


def test_a_backward_may_reach_two_optimizers_in_another_order_on_each_rank(world):
    world.run(first_gradients_in_another_order)


def nothing_outside_of_checkpoints():
    """No gradient belongs to the outer backward: each inner one ends a reduction."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    alone, net = model(), model()
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    for x, y in batches(4, 2, size):
        loss_of(alone, x, y).backward()
        hidden = own(x, rank, size).requires_grad_()
        for part in (net[:2], net[2:]):
            hidden = checkpoint(part, hidden, use_reentrant=True)
        nn.functional.mse_loss(hidden, own(y, rank, size)).backward()
        for p, q in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)
        for each in (reference, optimizer):
            each.step()
            each.zero_grad()
    assert_same_parameters(net, alone)


def test_a_model_may_lie_in_reentrant_checkpoints_altogether(world):
    world.run(nothing_outside_of_checkpoints)


def only_one_of_two():
    """The backward of rank 1 does not reach the first optimizer, whose round it runs in step."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    of_a = hvd.DistributedOptimizer(torch.optim.SGD([a], lr=1.0), op=hvd.Sum)
    of_b = hvd.DistributedOptimizer(torch.optim.SGD([b], lr=1.0), op=hvd.Sum)
    for _ in range(3):
        (b if rank == 1 else a + b).sum().backward()
        assert b.grad.item() == size
        of_a.step()
        of_b.step()
        assert a.grad.item() == size - 1
        of_a.zero_grad()
        of_b.zero_grad()


def test_a_backward_may_reach_one_of_two_optimizers_on_some_ranks(world):
    world.run(only_one_of_two)


def two_optimizers_with_passes():
    hvd.init()
    rank = hvd.rank()
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), backward_passes_per_step=2)
        for p in (a, b)
    ]
    for _ in range(3):
        for i in range(2):
            ((a + b) * (rank + 1)).sum().backward()
            if i == 0:
                assert a.grad.item() == b.grad.item() == rank + 1, "not reduced yet"
        assert a.grad.item() == b.grad.item() == 2 * mean_over_ranks(lambda r: r + 1)
        # The second of them has nobody call zero_grad.
        optimizers[0].step()
        optimizers[0].zero_grad()
        b.grad = None


def test_each_of_two_optimizers_counts_a_backward_once(world):
    world.run(two_optimizers_with_passes)


def ordinary(grad):
    return grad


def negated(grad):
    return torch._neg_view(-grad)


def strided(grad):
    return torch.stack([grad, grad], -1)[..., 0]


def expanded(grad):
    return torch.full((), 2.0, dtype=grad.dtype).expand_as(grad) * 0 + grad


def gradients_of(kind, shape, dtype):
    """In the third step, when the hooks know the buckets: as a hook of the script left them."""
    hvd.init()
    param = nn.Parameter(torch.zeros(shape, dtype=dtype))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=0.0))
    for step in range(3):
        factor = torch.arange(param.numel(), dtype=torch.float32).reshape(shape).to(dtype) + step
        optimizer.zero_grad()
        handle = param.register_hook(kind)
        loss = (param * factor * (1 + hvd.rank())).sum()
        (loss.real if loss.is_complex() else loss).backward()
        handle.remove()
        expected = factor * (1 + (hvd.size() - 1) / 2)
        assert torch.equal(param.grad, expected), (step, param.grad, expected)


@pytest.mark.parametrize("kind", [ordinary, negated, strided, expanded])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_a_gradient_is_copied_by_its_value(world, kind, dtype):
    for shape in ((1,), (3, 5), (600, 500)):
        world.run(gradients_of, kind, shape, dtype)


def backward_through_an_earlier_gradient():
    hvd.init()
    param, factor = nn.Parameter(torch.ones(4)), torch.ones(4, requires_grad=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([param], lr=0.0))
    for _ in range(3):
        optimizer.zero_grad()
        (param * 2).sum().backward()
    later = (param.grad * factor).sum()
    optimizer.zero_grad()
    (param * 3).sum().backward()
    later.backward()
    assert factor.grad.tolist() == [2.0] * 4


def test_a_gradient_that_autograd_has_saved_keeps_its_values(world):
    world.run(backward_through_an_earlier_gradient)
