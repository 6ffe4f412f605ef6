"""Several backwards in a step, one inside another, and one for two optimizers."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hvdlite as hvd
from tests.harness.on_ranks import on_ranks
from tests.optimizer.models import (
    Twins,
    assert_same_gradients,
    batches,
    mean_over_ranks,
    model,
    sgd,
)

pytestmark = [pytest.mark.ranks(2), pytest.mark.mpis("mpich")]


def parameters(count):
    return [nn.Parameter(torch.zeros(1)) for _ in range(count)]


@on_ranks(1, 3)
def test_a_parameter_may_get_its_gradient_from_a_later_backward_of_the_step():
    rank, size = hvd.rank(), hvd.size()
    a, b = parameters(2)
    optimizer = sgd([a, b], op=hvd.Sum)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=False)
        (a * (rank + 1)).backward()
        (b * 2).backward()
        # Each is reduced once.
        assert (a.grad.item(), b.grad.item()) == (size * (size + 1) / 2, 2 * size)
        optimizer.step()


# In the second case two losses of one network come before each step, as a discriminator has.
@pytest.mark.parametrize(
    ("passes", "words"),
    [
        (1, "pass backward_passes_per_step to .*no_sync"),
        (2, r"_step=2 reduces after every 2 backward passes.* one more before step\(\)"),
    ],
)
@on_ranks()
def test_a_pass_more_than_the_number_given_is_an_error_that_says_what_to_do(passes, words):
    (p,) = parameters(1)
    optimizer = sgd([p], names=[("layer.weight", p)], backward_passes_per_step=passes)
    for _ in range(passes):
        p.backward()
    for context in (contextlib.nullcontext, optimizer.no_sync):
        with context(), pytest.raises(RuntimeError, match=rf"'layer.weight'.*{words}") as caught:
            p.backward()
        assert ("pass backward_passes_per_step to" in str(caught.value)) == (passes == 1)
    optimizer.zero_grad()
    # A discarded gradient may come again, as where GradScaler has skipped the step.
    for _ in range(2):
        p.grad = None
        for _ in range(passes):
            p.backward()
        assert p.grad.item() == passes
    optimizer.step()


@on_ranks(2, 3)
def test_every_nth_backward_communicates_and_the_number_may_change_on_the_way():
    rank, mean = hvd.rank(), mean_over_ranks(lambda r: r + 1)
    (p,) = parameters(1)
    optimizer = sgd([p], backward_passes_per_step=3)
    assert optimizer.backward_passes_per_step == 3
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
    optimizer.zero_grad()
    (p * (rank + 1)).backward()
    optimizer.step()
    assert p.grad.item() == mean, "reduced by step"
    assert p.item() == -(3 + 1 + 4 + 2 + 1) * mean
    with pytest.raises(ValueError, match="at least 1"):
        optimizer.set_backward_passes_per_step(0)


# The last step is an epoch's rest.
@pytest.mark.parametrize(
    ("zeroes", "steps", "warned"),
    [((0, 3, 6), (2, 5, 6), ()), (range(7), range(7), (0,)), (range(7), (2, 5, 6), (2,))],
    ids=["accumulates", "steps after each", "zeroes gradients after each"],
)
@on_ranks()
def test_a_first_step_before_the_nth_backward_says_so_once(zeroes, steps, warned):
    """In these of seven batches."""
    text = r"step\(\) after 1 of backward_passes_per_step=3 backward passes.* once every 3 backward"
    (p,) = parameters(1)
    optimizer = sgd([p], backward_passes_per_step=3)
    for batch in range(7):
        if batch in zeroes:
            optimizer.zero_grad()
        p.backward()
        if batch in steps:
            warns = batch in warned
            with pytest.warns(UserWarning, match=text) if warns else contextlib.nullcontext():
                optimizer.step()
    assert warned or p.item() == -7


class Checkpointed(nn.Module):
    """Has the first so many layers of a model in two checkpoints."""

    def __init__(self, layers, reentrant):
        super().__init__()
        self.net, self.layers, self.reentrant = model(), layers, reentrant

    def forward(self, x):
        x = x.requires_grad_()
        for part in (self.net[:2], self.net[2 : self.layers]):
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return self.net[self.layers :](x)


# With all five layers inside, no gradient belongs to the outer backward: each inner one ends a
# reduction.
@pytest.mark.parametrize(
    ("layers", "reentrant", "passes"),
    [(4, False, 1), (4, False, 2), (4, True, 1), (4, True, 2), (5, True, 1)],
)
@on_ranks()
def test_checkpointed_parts_of_a_model_are_reduced_alike(layers, reentrant, passes):
    nets = model(), Checkpointed(layers, reentrant)
    twins = Twins(nets=nets, backward_passes_per_step=passes)
    for number, (x, y) in enumerate(batches(4 * passes, 2, hvd.size()), 1):
        twins.backward(x, y)
        if number % passes:
            first, whole = (next(net.parameters()).grad for net in (twins.net, twins.alone))
            assert not torch.equal(first, whole), "not reduced yet"
        else:
            assert_same_gradients(twins.net, twins.alone)
            twins.step()
            twins.zero_grad()


@pytest.mark.parametrize("passes", [1, 2])
@on_ranks()
def test_a_backward_may_reach_two_optimizers_in_another_order_on_each_rank(passes):
    """Each of them counts it once."""
    rank, mean = hvd.rank(), mean_over_ranks(lambda r: r + 1)
    params = parameters(2)
    optimizers = [sgd([p], backward_passes_per_step=passes) for p in params]
    for step in range(4):
        # Backward comes first to what was computed last.
        order = (0, 1) if (rank + step) % 2 else (1, 0)
        for number in range(1, passes + 1):
            products = {i: params[i] * (rank + 1) * (i + 1) for i in order}
            (products[0] + products[1]).backward()
            first = number * (mean if number == passes else rank + 1)
            assert [p.grad.item() for p in params] == [first, 2 * first]
        # In every other step nobody calls step and zero_grad of the second.
        for optimizer in optimizers[: 1 + step % 2]:
            optimizer.step()
            optimizer.zero_grad()
        params[1].grad = None


@on_ranks()
def test_a_backward_may_reach_one_of_two_optimizers_on_some_ranks():
    """The backward of rank 1 does not reach the first optimizer, whose round it runs in step."""
    a, b = parameters(2)
    optimizers = sgd([a], op=hvd.Sum), sgd([b], op=hvd.Sum)
    for _ in range(3):
        (b if hvd.rank() == 1 else a + b).backward()
        assert b.grad.item() == hvd.size()
        for optimizer in optimizers:
            optimizer.step()
        assert a.grad.item() == hvd.size() - 1
        for optimizer in optimizers:
            optimizer.zero_grad()


def ordinary(grad):
    return grad


def negated(grad):
    return torch._neg_view(-grad)


def strided(grad):
    return torch.stack([grad, grad], -1)[..., 0]


def expanded(grad):
    return torch.full((), 2.0, dtype=grad.dtype).expand_as(grad) * 0 + grad


@pytest.mark.parametrize("kind", [ordinary, negated, strided, expanded])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@on_ranks()
def test_a_gradient_is_copied_by_its_value(kind, dtype):
    """In the third step, when the hooks know the buckets: as a hook of the script left them."""
    for shape in ((1,), (3, 5), (600, 500)):
        param = nn.Parameter(torch.zeros(shape, dtype=dtype))
        optimizer = sgd([param], lr=0.0)
        for step in range(3):
            factor = torch.arange(param.numel()).reshape(shape).to(dtype) + step
            optimizer.zero_grad()
            handle = param.register_hook(kind)
            (param * factor * (1 + hvd.rank())).sum().real.backward()
            handle.remove()
            expected = factor * (1 + (hvd.size() - 1) / 2)
            assert torch.equal(param.grad, expected), (step, param.grad, expected)


@on_ranks()
def test_a_gradient_that_autograd_has_saved_keeps_its_values():
    param, factor = nn.Parameter(torch.ones(4)), torch.ones(4, requires_grad=True)
    optimizer = sgd([param], lr=0.0)
    for _ in range(3):
        optimizer.zero_grad()
        (param * 2).sum().backward()
    later = (param.grad * factor).sum()
    optimizer.zero_grad()
    (param * 3).sum().backward()
    later.backward()
    assert factor.grad.tolist() == [2.0] * 4
