"""scale_lr and GradualWarmup, against closed forms and one process on the joined batch."""

import io
import math
import re

import pytest
import torch
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

import hvdlite as hvd
from hvdlite.recipes import GradualWarmup, scale_lr

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")

LR, START, STEPS = 0.8, 0.1, 5


def sgd(*lrs, **options):
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": lr} for lr in lrs or (LR,)]
    return torch.optim.SGD(groups, lr=1.0, **options)


def rates(scheduler, steps, group=0):
    """The learning rates of the first steps."""
    found = []
    for _ in range(steps):
        found.append(float(scheduler.optimizer.param_groups[group]["lr"]))
        scheduler.step()
    return found


def warm(step, steps=STEPS):
    return LR if step >= steps else START + (LR - START) * step / steps


def test_the_rate_rises_in_equal_steps_and_ends_exactly_at_that_of_the_optimizer():
    scheduler = GradualWarmup(sgd(), START, steps=STEPS)
    assert isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)
    found = rates(scheduler, 9)
    assert found == pytest.approx([warm(step) for step in range(9)], rel=1e-15)
    assert found[0] == START
    assert found[STEPS:] == [LR] * 4


@pytest.mark.parametrize(
    ("length", "steps"),
    [
        ({"steps": 0}, 0),
        ({"steps": 1}, 1),
        ({"epochs": 3}, 3),
        ({"epochs": 5, "steps_per_epoch": 7}, 35),
        ({"epochs": 0.5, "steps_per_epoch": 7}, 4),
    ],
)
def test_its_length_is_in_steps_or_in_epochs(length, steps):
    scheduler = GradualWarmup(sgd(), START, **length)
    assert rates(scheduler, steps + 2) == pytest.approx(
        [warm(step, steps) for step in range(steps + 2)], rel=1e-15
    )


def test_each_parameter_group_goes_from_its_own_start_to_its_own_rate():
    scheduler = GradualWarmup(sgd(0.8, 0.2), [0.4, 0.0], steps=2)
    assert scheduler.get_last_lr() == [0.4, 0.0]
    scheduler.step()
    assert scheduler.get_last_lr() == pytest.approx([0.6, 0.1])
    scheduler.step()
    assert scheduler.get_last_lr() == [0.8, 0.2]


def test_a_rate_in_a_tensor_is_changed_in_place():
    lr = torch.tensor(LR, dtype=torch.float64)
    optimizer = torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=lr, capturable=False)
    scheduler = GradualWarmup(optimizer, START, steps=STEPS)
    assert rates(scheduler, 7) == pytest.approx([warm(step) for step in range(7)])
    assert optimizer.param_groups[0]["lr"] is lr


def in_sequence(optimizer):
    schedulers = [GradualWarmup(optimizer, START, steps=STEPS), CosineAnnealingLR(optimizer, 10)]
    return SequentialLR(optimizer, schedulers, [STEPS])


def in_chain(optimizer):
    return ChainedScheduler(
        [
            GradualWarmup(optimizer, START, steps=STEPS),
            StepLR(optimizer, 2, gamma=0.5),
            ConstantLR(optimizer, 0.25, total_iters=3),
        ]
    )


def chain_in_sequence(optimizer):
    chain = ChainedScheduler([GradualWarmup(optimizer, START, steps=STEPS)])
    return SequentialLR(optimizer, [chain, StepLR(optimizer, 2, gamma=0.5)], [STEPS])


def later_in_sequence(optimizer):
    schedulers = [ConstantLR(optimizer, 0.5), GradualWarmup(optimizer, START, steps=STEPS)]
    return SequentialLR(optimizer, schedulers, [3])


SCHEDULES = {
    in_sequence: lambda t: (
        warm(t) if t < STEPS else LR * (1 + math.cos(math.pi * (t - STEPS) / 10)) / 2
    ),
    in_chain: lambda t: warm(t) * 0.5 ** (t // 2) * (0.25 if t < 3 else 1),
    later_in_sequence: lambda t: 0.5 * LR if t < 3 else warm(t - 3),
}


@pytest.mark.parametrize("make", SCHEDULES, ids=lambda make: make.__name__)
def test_it_chains_with_the_schedulers_of_pytorch(make):
    expected = [SCHEDULES[make](step) for step in range(14)]
    assert rates(make(sgd()), 14) == pytest.approx(expected, rel=1e-14)


# What they multiply the rate by in step t.
MULTIPLYING = {
    "constant": (lambda o: ConstantLR(o, 0.5, total_iters=2), lambda t: 0.5 if t < 2 else 1.0),
    "step": (lambda o: StepLR(o, 2, gamma=0.5), lambda t: 0.5 ** (t // 2)),
    "exponential": (lambda o: ExponentialLR(o, 0.75), lambda t: 0.75**t),
    "linear": (
        lambda o: LinearLR(o, 0.25, total_iters=4),
        lambda t: 0.25 + 0.75 * min(t, 4) / 4,
    ),
    "polynomial": (lambda o: PolynomialLR(o, 20, power=2), lambda t: (1 - t / 20) ** 2),
    "cosine": (
        lambda o: CosineAnnealingLR(o, 20),
        lambda t: (1 + math.cos(math.pi * t / 20)) / 2,
    ),
}


def side_by_side(optimizer, other, is_before, is_chained, start=START):
    """The rates of nine steps, with another scheduler that is made and stepped first, or last."""
    makes = [lambda o: GradualWarmup(o, start, steps=STEPS), other]
    made = [make(optimizer) for make in (makes[::-1] if is_before else makes)]
    schedulers = [ChainedScheduler(made)] if is_chained else made
    found = []
    for _ in range(9):
        found.append(optimizer.param_groups[0]["lr"])
        for scheduler in schedulers:
            scheduler.step()
    return found


@pytest.mark.parametrize("is_chained", [False, True], ids=["separate", "chained"])
@pytest.mark.parametrize("is_before", [False, True], ids=["last", "first"])
@pytest.mark.parametrize("name", MULTIPLYING)
def test_what_another_scheduler_multiplies_the_rate_by_stays_multiplied(
    name, is_before, is_chained
):
    other, factor = MULTIPLYING[name]
    expected = [warm(step) * factor(step) for step in range(9)]
    found = side_by_side(sgd(), other, is_before, is_chained)
    assert found == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("name", ["step", "exponential", "polynomial", "cosine"])
def test_after_a_start_at_zero_a_scheduler_that_is_stepped_last_keeps_its_factor(name):
    other, factor = MULTIPLYING[name]
    found = side_by_side(sgd(), other, is_before=False, is_chained=True, start=0.0)
    expected = [LR * min(step / STEPS, 1) * factor(step) for step in range(9)]
    assert found == pytest.approx(expected, rel=1e-14)


SETTING = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda _: 1.0),
    "falling lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 0.9**step),
    "restarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 6),
    "one by hand": lambda optimizer: ByHand(optimizer, LR),
}


class ByHand:
    """No scheduler: a script that writes the rate into the groups."""

    def __init__(self, optimizer, lr):
        self.optimizer, self.lr = optimizer, lr

    def step(self):
        self.optimizer.param_groups[0]["lr"] = self.lr


@pytest.mark.parametrize("start", [START, 0.0])
@pytest.mark.parametrize("is_before", [False, True], ids=["last", "first"])
@pytest.mark.parametrize("name", SETTING)
def test_a_scheduler_that_sets_the_rate_beside_it_is_an_error(name, is_before, start):
    with pytest.raises(
        RuntimeError,
        match=r"group 0 was 0\S* after step [01] of 5, and is 0\.\d+ now: .* SequentialLR\(",
    ):
        side_by_side(sgd(), SETTING[name], is_before, is_chained=False, start=start)


def test_a_parameter_group_that_comes_during_the_warm_up_is_an_error_and_later_none():
    optimizer = sgd()
    scheduler = GradualWarmup(optimizer, START, steps=2)
    more = {"params": [torch.zeros(1, requires_grad=True)], "lr": 0.3}
    optimizer.add_param_group(more)
    with pytest.raises(
        RuntimeError, match=r"has 2 parameter groups, and had 1 when .* after its 2 steps"
    ):
        scheduler.step()
    del optimizer.param_groups[1]
    for _ in range(2):
        scheduler.step()
    optimizer.add_param_group(more)
    scheduler.step()
    assert scheduler.get_last_lr() == [LR, 0.3]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_start_at_the_rate_of_a_tensor_is_no_start_above_it(dtype):
    lr = torch.tensor(0.7, dtype=dtype)
    optimizer = torch.optim.Adam([torch.zeros(1, requires_grad=True)], lr=lr)
    assert rates(GradualWarmup(optimizer, 0.7, steps=3), 5) == [float(lr)] * 5


def test_after_the_warm_up_it_leaves_the_rate_to_others():
    optimizer = sgd()
    warmup = GradualWarmup(optimizer, START, steps=2)
    plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for _ in range(2):
        warmup.step()
    found = []
    for loss in (1.0, 2.0, 3.0):
        warmup.step()
        plateau.step(loss)
        found.append(optimizer.param_groups[0]["lr"])
    assert found == [LR, LR / 2, LR / 4]


def alone(optimizer):
    return GradualWarmup(optimizer, START, steps=STEPS)


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)  # with weights_only, as Checkpointer does


@pytest.mark.parametrize("make", [alone, in_chain, later_in_sequence, in_sequence])
@pytest.mark.parametrize("at", [1, 4, 7])
def test_a_state_dict_resumes_a_warm_up_bit_for_bit(make, at):
    whole = rates(make(sgd()), 14)
    before = make(sgd())
    assert rates(before, at) == whole[:at]
    optimizer = sgd()
    after = make(optimizer)
    optimizer.load_state_dict(saved_and_loaded(before.optimizer.state_dict()))
    after.load_state_dict(saved_and_loaded(before.state_dict()))
    assert rates(after, 14 - at) == whole[at:]


def test_made_with_last_epoch_it_goes_on_where_the_optimizer_is():
    before = alone(sgd())
    rates(before, 3)
    optimizer = sgd()
    optimizer.load_state_dict(before.optimizer.state_dict())
    after = GradualWarmup(optimizer, START, steps=STEPS, last_epoch=2)
    assert rates(after, 5) == pytest.approx([warm(step) for step in range(3, 8)], rel=1e-15)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "steps=None, epochs=None: expected one of them"),
        ({"steps": 1, "epochs": 1}, "steps=1, epochs=1: expected one of them"),
        ({"steps": -1}, "a warm-up of -1 steps; expected 0 or more"),
        ({"epochs": math.inf}, "a warm-up of inf steps; expected 0 or more"),
        ({"epochs": 1, "steps_per_epoch": 0}, "steps_per_epoch=0, expected at least 1"),
        ({"steps": 1, "start_lr": 0.9}, "start_lr=0.9 of parameter group 0 is not between 0 and"),
        ({"steps": 1, "start_lr": -0.1}, "start_lr=-0.1 of parameter group 0 is not between 0"),
        ({"steps": 1, "start_lr": [0.1] * 2}, "2 start rates for 1 parameter groups; pass one"),
        (
            {"steps": 1, "momentum_correction": True},
            "correct_momentum: SGD's momentum buffers do not contain the learning rate",
        ),
    ],
)
def test_a_wrong_warm_up_is_an_error(options, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        GradualWarmup(sgd(), **{"start_lr": START, **options})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"backward_passes_per_step": 4}, "adds up 4 gradients; pass loss_divided=True if the"),
        ({"backward_passes_per_step": 0}, "=0, expected at least 1"),
        ({"batch": 4}, "and base_batch are given together, or neither"),
        ({"batch": 0, "base_batch": 4}, "=0, base_batch=4, expected at least 1"),
        ({"rule": "cubic"}, "='cubic', expected 'linear' or 'sqrt'"),
        ({"op": hvd.Max}, "expected Average, Sum or Adasum"),
    ],
)
def test_a_wrong_scaling_is_an_error(options, text):
    with pytest.raises(ValueError, match=f"^scale_lr: .*{re.escape(text)}"):
        scale_lr(0.1, **options)


def one_step(parameter, optimizer, batches, divisor, weighs=False):
    """A step with a backward pass for each batch; what it adds to the parameter."""
    before = parameter.detach().clone()
    for batch in batches:
        if weighs:
            optimizer.set_weight(len(batch))
        (((parameter * batch).sum(dim=1) ** 2).mean() / divisor).backward()
    optimizer.step()
    return parameter.detach() - before


def moved_by_a_step(op, passes, divided, equal_ranks, weighs=False):
    """What a step of all ranks adds, with a scaled rate; and one process with as many samples, and
    the same multiple of the rate."""
    hvd.init()
    lr = 2.0**-10
    data = torch.Generator().manual_seed(5)
    samples = torch.rand(hvd.size(), passes, 4, 3, generator=data, dtype=torch.float64)
    if equal_ranks:
        samples = samples[:1].expand(hvd.size(), -1, -1, -1)
    scaled = scale_lr(lr, op=op, backward_passes_per_step=passes, loss_divided=divided)
    parameter = torch.ones(3, dtype=torch.float64, requires_grad=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=scaled), op=op, backward_passes_per_step=passes
    )
    divisor = passes if divided and not weighs else 1
    moved = one_step(parameter, optimizer, samples[hvd.rank()], divisor, weighs)

    # Adasum of equal steps is one of them: the ranks do not count.
    growth = passes if op is hvd.Adasum else passes * hvd.size()
    alone = torch.ones(3, dtype=torch.float64, requires_grad=True)
    joined = samples.reshape(1, -1, 3)
    by_one = one_step(alone, torch.optim.SGD([alone], lr=lr * growth), joined, 1)
    return torch.allclose(moved, by_one, rtol=1e-12, atol=0)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("divided", [True, False])
@pytest.mark.parametrize(
    ("op", "passes"), [(hvd.Average, 1), (hvd.Average, 3), (hvd.Sum, 3), (hvd.Adasum, 3)]
)
def test_a_step_with_the_scaled_rate_is_that_of_one_process_with_the_multiple(
    world, op, passes, divided
):
    assert all(world.run(moved_by_a_step, op, passes, divided, op is hvd.Adasum))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("passes", [1, 4])
def test_weights_count_as_a_divided_loss(world, passes):
    assert all(world.run(moved_by_a_step, hvd.Average, passes, True, False, weighs=True))


def factors():
    hvd.init()
    pair = hvd.add_process_set([0, 1])
    adam = {"rule": "sqrt", "backward_passes_per_step": 4, "loss_divided": False}
    found = [
        scale_lr(1.0),
        scale_lr(1.0, process_set=pair),
        scale_lr(0.1, batch=64, base_batch=256),
        scale_lr(1.0, **adam),
        scale_lr(1.0, op=hvd.Sum, **adam),
        scale_lr(1.0, op=hvd.Adasum, **adam),
        scale_lr(1.0, op=hvd.Adasum),
    ]
    hvd.remove_process_set(pair)
    return found


@pytest.mark.ranks(3)
def test_the_factor_is_the_growth_of_the_batch_by_the_rule(world):
    inside = [3.0, 2.0, 0.1 * 3 / 4, math.sqrt(12), math.sqrt(12), 2.0, 1.0]
    # A rank outside of the process set trains alone.
    outside = [3.0, 1.0, *inside[2:]]
    for found, expected in zip(world.run(factors), [inside, inside, outside], strict=True):
        assert found == pytest.approx(expected, rel=1e-15)


def losses(ranks, rank, wrap):
    """A regression with a warm-up of two epochs; each rank has every ranks-th row of a batch."""
    data = torch.Generator().manual_seed(11)
    inputs = torch.randn(48, 6, generator=data, dtype=torch.float64)
    targets = inputs @ torch.randn(6, 1, generator=data, dtype=torch.float64)
    model = torch.nn.Linear(6, 1, dtype=torch.float64)
    with torch.no_grad():
        model.weight.fill_(0.1), model.bias.zero_()
    base = 0.02
    lr = scale_lr(base) if wrap else base * ranks
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)
    if wrap:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    warmup = GradualWarmup(optimizer, base, epochs=2, steps_per_epoch=4)
    cosine = CosineAnnealingLR(optimizer, 8)
    schedule = SequentialLR(optimizer, [warmup, cosine], [8])
    found = []
    for step in range(16):
        rows = slice(12 * (step % 4), 12 * (step % 4) + 12)
        mine = [tensor[rows][rank :: ranks if wrap else 1] for tensor in (inputs, targets)]
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(mine[0]), mine[1])
        loss.backward()
        optimizer.step()
        schedule.step()
        found.append(hvd.allreduce(loss.detach()).item() if wrap else loss.item())
    return found


def losses_of_all_and_of_one():
    hvd.init()
    return losses(hvd.size(), hvd.rank(), True), losses(hvd.size(), 0, False)


@pytest.mark.ranks(2, 3)
@pytest.mark.hosts("2,1")
def test_ranks_with_a_warm_up_have_the_losses_of_one_process_on_the_joined_batch(world):
    for many, one in world.run(losses_of_all_and_of_one):
        assert many == pytest.approx(one, rel=1e-9)
        assert one[-1] < one[0] / 10
