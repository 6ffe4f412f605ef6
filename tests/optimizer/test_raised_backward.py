"""After a backward that raised, which may have left a reduction unfinished."""

import random
import time

import pytest
import torch
from torch import nn

import hvdlite as hvd
from hvdlite.errors import HorovodInternalError
from tests.harness.on_ranks import on_ranks
from tests.optimizer.models import ONE_BY_ONE, mean_over_ranks, sgd

pytestmark = [pytest.mark.ranks(2), pytest.mark.mpis("mpich")]


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise KeyError("in backward")


def two():
    return nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))


def fails(a, b, weight=1):
    """Brings a gradient to b, and then raises."""
    with pytest.raises(KeyError):
        (Raises.apply(a * 2) + b * weight).backward()


@pytest.mark.parametrize(
    "how", ["zero_grad", "zero_grad of the model", "in place", "nothing", "not reached again"]
)
@on_ranks()
def test_where_nothing_had_started_the_next_backward_begins_anew(how):
    weight = hvd.rank() + 1
    a, b = two()
    optimizer = sgd([a, b])
    for _ in range(3):
        fails(a, b, weight)
        assert b.grad.item() == weight
        if how == "zero_grad":
            optimizer.zero_grad()
        elif how == "zero_grad of the model":
            a.grad = b.grad = None
        elif how == "in place":
            b.grad.zero_()
        (a * 2 if how == "not reached again" else a * 2 + b * weight).backward()
        # As in one process, what is not zeroed is added to.
        times = 2 if how == "nothing" else 1
        assert (a.grad.item(), b.grad.item()) == (2.0, times * mean_over_ranks(lambda r: r + 1))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("late", [0, 1])
@on_ranks(knobs=ONE_BY_ONE)
def test_where_the_first_backward_raises_no_rank_has_started(late):
    """By the rank that is late, all others have long posted what shows that models are alike."""
    weight = hvd.rank() + 1
    a, b = two()
    if hvd.rank() == late:
        time.sleep(0.5)
    optimizer = sgd([a, b])
    fails(a, b, 8 * weight)
    optimizer.zero_grad()
    (a * 2 + b * weight).backward()
    assert (a.grad.item(), b.grad.item()) == (2.0, 1.5)
    hvd.barrier()


@on_ranks()
def test_a_backward_that_raised_is_not_one_of_the_passes_per_step():
    weight = hvd.rank() + 1
    a, b = two()
    optimizer = sgd([a, b], backward_passes_per_step=2)
    for failing in (0, 1):
        for i in range(2):
            if i == failing:
                fails(a, b)
                b.grad = None if i == 0 else torch.full_like(b, float(weight))
            (a * weight + b * weight).backward()
            if i == 0:
                assert a.grad.item() == weight, "not reduced yet"
        assert a.grad.item() == b.grad.item() == 2 * mean_over_ranks(lambda r: r + 1)
        optimizer.step()
        optimizer.zero_grad()


class Training:
    """For each letter of `order`, such as 'abab', a parameter of the optimizer of that name, which
    is a bucket, after steps from which on buckets start when they can."""

    def __init__(self, order, **options):
        self.params = [(name, nn.Parameter(torch.zeros(1))) for name in order]
        self.optimizers = {name: sgd(self.of(name), **options) for name in sorted(set(order))}
        self.steps = 0
        for _ in range(2):
            self.make_step()

    def of(self, names):
        return [param for name, param in self.params if name in names]

    def loss(self, raises_at=None, of="ab"):
        """Its last gradient comes first; before one, backward raises."""
        found = 0.0
        for number, param in enumerate(self.of(of)):
            found = found + param * (number + 1)
            if number == raises_at:
                found = Raises.apply(found)
        return found

    def fails(self, raises_at, of="ab"):
        with pytest.raises(KeyError):
            self.loss(raises_at, of).backward()

    def zero_grad(self):
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()

    def make_step(self):
        """All ranks have the same values after it, and the right ones."""
        self.loss().backward()
        for optimizer in self.optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        self.steps += 1
        self.require_steps()

    def require_steps(self):
        found = [param.item() for _, param in self.params]
        assert found == [-float(self.steps * (number + 1)) for number in range(len(found))]

    def leaves_the_batch_out(self):
        self.zero_grad()
        self.require_steps()
        self.make_step()


def refused(*calls):
    for call in calls:
        with pytest.raises(RuntimeError, match=r"call the optimizer's zero_grad\(\)"):
            call()


def raised_on(*ranks):
    """What the error says, which is the same on all ranks."""
    others = [rank for rank in range(hvd.size()) if rank not in ranks]
    states = [("an exception on rank", ranks), ("no exception on rank", others)]
    if 0 in others:
        states.reverse()
    words = [f"{state}{'s' * (len(its) > 1)} {', '.join(map(str, its))}" for state, its in states]
    return f"and not on others: {', '.join(words)}. Some gradients are missing"


def given_up_by_one(training, raises_at, who=1, how="zero_grad", of="ab"):
    """Rank `who` raises in a backward that reaches these optimizers, and goes on in this way."""
    optimizers = [training.optimizers[name] for name in of if name in training.optimizers]
    for _ in range(2):
        go_on = training.loss(of=of).backward
        if hvd.rank() == who:
            training.fails(raises_at, of)
            go_on = getattr(optimizers[0], how, go_on)
        if hvd.rank() != who or how != "zero_grad":
            with pytest.raises(HorovodInternalError, match=raised_on(who)):
                go_on()
            refused(*(each.step for each in optimizers), training.loss(of=of).backward)
        training.leaves_the_batch_out()


@pytest.mark.mpis("openmpi", "mpich")
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("raises_at", [0, 1])
@on_ranks(2, 3, knobs=ONE_BY_ONE)
def test_what_one_rank_gives_up_is_an_error_on_all_and_no_step(who, raises_at):
    given_up_by_one(Training("aaa"), raises_at, who)


@pytest.mark.parametrize(
    ("how", "knobs", "options"),
    [
        ("step", ONE_BY_ONE, {}),
        ("synchronize", ONE_BY_ONE, {}),
        ("backward", ONE_BY_ONE, {}),
        # No bucket has started.
        ("zero_grad", {}, {}),
        ("step", {}, {}),
        ("zero_grad", ONE_BY_ONE, {"shard": True}),
        ("zero_grad", ONE_BY_ONE, {"compression": hvd.Compression.fp16}),
    ],
)
@on_ranks()
def test_and_however_the_program_goes_on_and_reduces(how, knobs, options):
    given_up_by_one(Training("aaa", **options), 0, how=how)


# What rank 1 has begun before it raises: of both, only of b, only of a.
@pytest.mark.mpis("openmpi", "mpich")
@pytest.mark.parametrize(
    ("order", "raises_at"), [("abab", 1), ("abab", 2), ("aabb", 2), ("bbaa", 2)]
)
@on_ranks(2, 3, knobs=ONE_BY_ONE)
def test_a_batch_of_two_optimizers_is_given_up_for_both(order, raises_at):
    given_up_by_one(Training(order), raises_at)


@pytest.mark.parametrize(
    ("of", "raises_at", "how"), [("ab", 1, "step"), ("a", 0, "zero_grad"), ("b", 0, "zero_grad")]
)
@on_ranks(knobs=ONE_BY_ONE)
def test_only_the_optimizers_that_the_backward_reaches_refuse_a_step(of, raises_at, how):
    given_up_by_one(Training("abab"), raises_at, how=how, of=of)


@on_ranks(knobs=ONE_BY_ONE)
def test_where_all_ranks_raise_the_errors_say_how_to_go_on():
    training = Training("aaa")
    optimizer = training.optimizers["a"]
    for _ in range(2):
        training.fails(0)
        refused(
            *(training.loss().backward, optimizer.step, training.loss().backward),
            *(optimizer.synchronize, optimizer.skip_synchronize()(optimizer.step)),
        )
        training.leaves_the_batch_out()


@pytest.mark.parametrize(
    ("order", "places"),
    [
        *(("aaa", places) for places in ((1, 1), (1, 0), (0, 1))),
        # They have begun of both optimizers, or only of b.
        *(("abab", places) for places in ((1, 2), (2, 1), (1, 1), (2, 2))),
    ],
)
@on_ranks(knobs=ONE_BY_ONE)
def test_a_batch_that_all_ranks_give_up_is_left_out(order, places):
    training = Training(order)
    for _ in range(2):
        training.fails(places[hvd.rank()])
        training.leaves_the_batch_out()


@pytest.mark.parametrize("seed", [1, 2])
@on_ranks(2, 3, knobs=ONE_BY_ONE)
def test_whichever_ranks_give_up_what_all_go_on_alike(seed):
    """Some ranks raise when they have begun b, or b and a; each rank takes its time."""
    training = Training("abab")
    drawn, pace = random.Random(seed), random.Random(hvd.rank())
    for _ in range(12):
        places = [drawn.choice((None, 1, 2)) for _ in range(hvd.size())]
        place, raised = places[hvd.rank()], [rank for rank, at in enumerate(places) if at]
        time.sleep(pace.choice((0, 0, 0.1, 0.3)))
        if not raised:
            training.make_step()
            continue
        if place:
            training.fails(place)
            time.sleep(pace.choice((0, 0, 0.1, 0.3)))
        else:
            with pytest.raises(HorovodInternalError, match=raised_on(*raised)):
                training.loss().backward()
        for name in pace.sample("ab", 2):
            training.optimizers[name].zero_grad()
        training.require_steps()
    training.make_step()


@pytest.mark.parametrize(
    "knobs", [ONE_BY_ONE, {**ONE_BY_ONE, "HVDLITE_DETERMINISTIC": "virtual:2"}]
)
@on_ranks()
def test_gradients_of_the_script_are_left_alone(knobs):
    """Rank 1 has not begun a, whose gradients it has set; so none of them belongs to the batch."""
    training = Training("abab")
    for _ in range(2):
        training.fails(1 + hvd.rank())
        if hvd.rank() == 1:
            for param in training.of("a"):
                param.grad = torch.ones(1)
        training.optimizers["b"].zero_grad()
        if hvd.rank() == 1:
            assert [param.grad.item() for param in training.of("a")] == [1, 1]
        training.leaves_the_batch_out()
