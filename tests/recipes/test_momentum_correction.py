"""Momentum correction, for optimizers whose momentum contains the learning rate."""

import pytest
import torch

import hvdlite as hvd
from hvdlite.recipes import GradualWarmup, correct_momentum

START, LR, STEPS, MOMENTUM = 0.01, 0.08, 4, 0.9


class RateInMomentum(torch.optim.Optimizer):
    """SGD in the form v = m·v + lr·g; w = w - v (Goyal et al., equation 10), or with Nesterov's
    momentum w = w - (m·v + lr·g)."""

    def __init__(self, params, lr, nesterov=False):
        super().__init__(params, {"lr": lr, "nesterov": nesterov})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(param)
                moved = group["lr"] * param.grad
                buffer = state["momentum_buffer"].mul_(MOMENTUM).add_(moved)
                param -= MOMENTUM * buffer + moved if group["nesterov"] else buffer


def parameter():
    return torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64, requires_grad=True)


def train(param, optimizer, schedule, steps, scale=1.0):
    """Minimizes a quadratic with known gradients; the parameter after each step."""
    found = []
    for _ in range(steps):
        param.grad = scale * torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64) * param.detach()
        optimizer.step()
        schedule.step()
        found.append(param.detach().clone())
    return torch.stack(found)


def with_rate_in_momentum(correction, nesterov=False):
    param = parameter()
    optimizer = RateInMomentum([param], LR, nesterov)
    warmup = GradualWarmup(optimizer, START, steps=STEPS, momentum_correction=correction)
    return param, optimizer, warmup


@pytest.mark.parametrize("nesterov", [False, True])
def test_corrected_it_goes_as_the_form_whose_momentum_has_no_rate(nesterov):
    param = parameter()
    reference = torch.optim.SGD([param], LR, momentum=MOMENTUM, nesterov=nesterov)
    expected = train(param, reference, GradualWarmup(reference, START, steps=STEPS), 10)
    corrected = train(*with_rate_in_momentum(True, nesterov), 10)
    without = train(*with_rate_in_momentum(False, nesterov), 10)
    torch.testing.assert_close(corrected, expected, rtol=1e-13, atol=0)
    assert (without - expected).abs().max() > 1e-2


def test_it_is_what_horovod_does_to_plain_momentum_for_one_step():
    # v = m·(lr / last)·v + lr·g, as the callback for Keras sets the momentum.
    value = parameter().detach().clone()
    velocity, last, found = torch.zeros(3, dtype=torch.float64), START, []
    for step in range(10):
        lr = START + (LR - START) * min(step, STEPS) / STEPS
        gradient = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64) * value
        velocity = MOMENTUM * (lr / last) * velocity + lr * gradient
        value = value - velocity
        found.append(value)
        last = lr
    corrected = train(*with_rate_in_momentum(True), 10)
    torch.testing.assert_close(corrected, torch.stack(found), rtol=1e-13, atol=0)


def test_it_follows_whatever_changes_the_rate():
    results = []
    for kind in (RateInMomentum, torch.optim.SGD):
        param = parameter()
        options = {} if kind is RateInMomentum else {"momentum": MOMENTUM}
        optimizer = kind([param], LR, **options)
        if kind is RateInMomentum:
            correct_momentum(optimizer)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.1)
        first = train(param, optimizer, schedule, 5)
        optimizer.param_groups[0]["lr"] = 0.05
        results.append(torch.cat([first, train(param, optimizer, schedule, 3)]))
    torch.testing.assert_close(*results, rtol=1e-13, atol=0)


@pytest.mark.parametrize("at", [2, 4, 6])
def test_the_optimizers_state_dict_resumes_it_bit_for_bit(at):
    expected = train(*with_rate_in_momentum(True), 8)
    param, optimizer, warmup = with_rate_in_momentum(True)
    train(param, optimizer, warmup, at)
    after, resumed, schedule = with_rate_in_momentum(True)
    after.data.copy_(param.data)
    resumed.load_state_dict(optimizer.state_dict())
    schedule.load_state_dict(warmup.state_dict())
    assert torch.equal(train(after, resumed, schedule, 8 - at), expected[at:])


def test_the_handle_ends_it():
    param = parameter()
    optimizer = RateInMomentum([param], LR)
    correct_momentum(optimizer).remove()
    schedule = GradualWarmup(optimizer, START, steps=STEPS)
    without = train(*with_rate_in_momentum(False), 6)
    assert torch.equal(train(param, optimizer, schedule, 6), without)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop, torch.optim.AdamW])
def test_an_optimizer_of_pytorch_needs_none(kind):
    with pytest.raises(ValueError, match=f"correct_momentum: {kind.__name__}'s momentum buffers"):
        correct_momentum(kind([parameter()], LR))


def of_a_distributed_optimizer(before, options):
    hvd.init()
    param = parameter()
    optimizer = RateInMomentum([param], LR)
    if before:
        correct_momentum(optimizer)
    optimizer = hvd.DistributedOptimizer(optimizer, **options)
    schedule = GradualWarmup(optimizer, START, steps=STEPS, momentum_correction=not before)
    expected = train(*with_rate_in_momentum(True), 7)
    found = []
    for _ in range(7):
        optimizer.zero_grad()
        # The ranks' gradients differ, and their mean is that of one process.
        share = 2 * (hvd.rank() + 1) / (hvd.size() + 1)
        factors = share * torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
        (0.5 * factors * param**2).sum().backward()
        optimizer.step()
        schedule.step()
        found.append(param.detach().clone())
    return torch.allclose(torch.stack(found), expected, rtol=1e-12, atol=0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"shard": True}])
@pytest.mark.parametrize("before", [True, False])
def test_a_distributed_optimizer_is_corrected_once(world, before, options):
    assert world.run(of_a_distributed_optimizer, before, options) == [True] * 2


def is_refused_for_an_optimizer_of_pytorch():
    hvd.init()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter()], LR, momentum=MOMENTUM))
    with pytest.raises(ValueError, match="correct_momentum: SGD's momentum buffers"):
        correct_momentum(optimizer)


@pytest.mark.ranks(2)
def test_a_distributed_optimizer_of_pytorch_needs_none_either(world):
    world.run(is_refused_for_an_optimizer_of_pytorch)
