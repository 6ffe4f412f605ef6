"""After a backward that raised, which may have left a reduction unfinished."""

import random
import time

import pytest
import torch
from torch import nn

import hvdlite as hvd
from hvdlite.errors import HorovodInternalError
from tests.optimizer.models import mean_over_ranks

pytestmark = [pytest.mark.ranks(2), pytest.mark.mpis("mpich")]

# Each gradient is a bucket of its own, and starts when it comes.
ONE_BY_ONE = {"HVDLITE_BUCKET_BYTES": "0", "HVDLITE_FIRST_BUCKET_BYTES": "0"}


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


def nothing_had_started(how):
    hvd.init()
    weight = hvd.rank() + 1
    mean = mean_over_ranks(lambda r: r + 1)
    a, b = two()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a, b], lr=1.0))
    for _ in range(3):
        fails(a, b, weight)
        if how == "zero_grad of the optimizer":
            optimizer.zero_grad()
        elif how == "zero_grad of the model":
            a.grad = b.grad = None
        elif how == "in place":
            b.grad.zero_()
        (a * 2 + b * weight).backward()
        # As in one process, what is not zeroed is added to.
        times = 2 if how == "nothing" else 1
        assert (a.grad.item(), b.grad.item()) == (2.0, times * mean)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "how", ["zero_grad of the optimizer", "zero_grad of the model", "in place", "nothing"]
)
def test_where_nothing_had_started_the_next_backward_begins_anew(world, how):
    world.run(nothing_had_started, how)


def first_backward_raises(late):
    """By the rank that is late, all others have long posted what shows that models are alike."""
    hvd.init()
    weight = hvd.rank() + 1
    a, b = two()
    if hvd.rank() == late:
        time.sleep(0.5)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a, b], lr=1.0))
    fails(a, b, 8 * weight)
    optimizer.zero_grad()
    (a * 2 + b * weight).backward()
    found = a.grad.item(), b.grad.item()
    hvd.barrier()
    return found


@pytest.mark.parametrize("late", [0, 1])
def test_where_the_first_backward_raises_no_rank_has_started(world, late):
    assert world.run(first_backward_raises, late, knobs=ONE_BY_ONE) == [(2.0, 1.5)] * 2


def something_had_started():
    hvd.init()
    a, b = two()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a, b], lr=1.0))
    # Backward comes to b first, as in what fails: its bucket starts before.
    (b + a).backward()
    optimizer.step()
    optimizer.zero_grad()
    for _ in range(2):
        fails(a, b)
        for go_on in (
            *((a + b).backward, optimizer.step, (a + b).backward, optimizer.synchronize),
            optimizer.skip_synchronize()(optimizer.step),
        ):
            with pytest.raises(RuntimeError, match=r"call the optimizer's zero_grad\(\)"):
                go_on()
        optimizer.zero_grad()
        (a * 2 + b).backward()
        assert (a.grad.item(), b.grad.item()) == (2.0, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def test_where_other_ranks_wait_the_errors_say_how_to_go_on(world):
    world.run(something_had_started, knobs=ONE_BY_ONE)


def raised_on(*ranks):
    """What the error says, which is the same on all ranks."""
    others = [rank for rank in range(hvd.size()) if rank not in ranks]
    states = [("an exception on rank", ranks), ("no exception on rank", others)]
    if 0 in others:
        states.reverse()
    words = [f"{state}{'s' * (len(its) > 1)} {', '.join(map(str, its))}" for state, its in states]
    return f"and not on others: {', '.join(words)}. Some gradients are missing"


def chain(params, raises_at=None):
    """A loss whose last gradient comes first, as in their buckets; before one, backward raises."""
    found = 0.0
    for number, param in enumerate(params):
        found = found + param * (number + 1)
        if number == raises_at:
            found = Raises.apply(found)
    return found


class Training:
    """Three parameters, each a bucket, after steps from which on buckets start when they can."""

    def __init__(self, **options):
        hvd.init()
        self.params = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
        sgd = torch.optim.SGD(self.params, lr=1.0)
        self.optimizer = hvd.DistributedOptimizer(sgd, **options)
        self.steps = 0
        for _ in range(2):
            self.make_step()

    def make_step(self):
        """All ranks have the same values after it, and the right ones."""
        chain(self.params).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        self.require_steps()

    def require_steps(self):
        found = [param.item() for param in self.params]
        assert found == [-float(self.steps * (number + 1)) for number in range(3)]

    def fails(self, raises_at):
        with pytest.raises(KeyError):
            chain(self.params, raises_at).backward()


def given_up_by_one(who, raises_at, how, options):
    training = Training(**options)
    for _ in range(2):
        go_on = chain(training.params).backward
        if hvd.rank() == who:
            training.fails(raises_at)
            go_on = getattr(training.optimizer, how, go_on)
        if hvd.rank() == who and how == "zero_grad":
            go_on()
        else:
            with pytest.raises(HorovodInternalError, match=raised_on(who)):
                go_on()
            for use in (training.optimizer.step, chain(training.params).backward):
                with pytest.raises(RuntimeError, match=r"call the optimizer's zero_grad\(\)"):
                    use()
        training.optimizer.zero_grad()
        training.require_steps()
        training.make_step()


@pytest.mark.ranks(2, 3)
@pytest.mark.mpis("openmpi", "mpich")
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("raises_at", [0, 1])
def test_what_one_rank_gives_up_is_an_error_on_all_and_no_step(world, who, raises_at):
    world.run(given_up_by_one, who, raises_at, "zero_grad", {}, knobs=ONE_BY_ONE)


@pytest.mark.parametrize("how", ["step", "synchronize", "backward"])
def test_and_however_the_program_goes_on(world, how):
    world.run(given_up_by_one, 1, 0, how, {}, knobs=ONE_BY_ONE)


@pytest.mark.parametrize("how", ["zero_grad", "step"])
def test_and_if_no_bucket_had_started(world, how):
    world.run(given_up_by_one, 1, 0, how, {})


@pytest.mark.parametrize(
    "options", [{"shard": True}, {"compression": hvd.Compression.fp16}], ids=["shard", "fp16"]
)
def test_the_same_holds_for_shards_and_in_16_bits(world, options):
    world.run(given_up_by_one, 1, 0, "zero_grad", options, knobs=ONE_BY_ONE)


def given_up_by_all(places):
    training = Training()
    for _ in range(2):
        training.fails(places[hvd.rank()])
        training.optimizer.zero_grad()
        training.require_steps()
        training.make_step()


@pytest.mark.parametrize("places", [(1, 1), (1, 0), (0, 1)])
def test_a_batch_that_all_ranks_give_up_is_left_out(world, places):
    world.run(given_up_by_all, places, knobs=ONE_BY_ONE)


class TwoOptimizers:
    """Two parameters each; in one backward, whose chain has them in an order such as 'aabb'."""

    def __init__(self, order):
        hvd.init()
        self.order, self.steps = order, 0
        self.params = {name: list(two()) for name in "ab"}
        self.optimizers = {
            name: hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0))
            for name, params in self.params.items()
        }
        for _ in range(2):
            self.make_step()

    def chain(self, raises_at=None, of="ab"):
        left = {name: iter(params) for name, params in self.params.items()}
        return chain([next(left[name]) for name in self.order if name in of], raises_at)

    def zero_grad(self):
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()

    def make_step(self):
        self.chain().backward()
        for optimizer in self.optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        self.steps += 1
        self.require_steps()

    def require_steps(self):
        left = {name: iter(params) for name, params in self.params.items()}
        found = [next(left[name]).item() for name in self.order]
        assert found == [-float(self.steps * (number + 1)) for number in range(4)]

    def fails(self, raises_at, of="ab"):
        with pytest.raises(KeyError):
            self.chain(raises_at, of).backward()


def one_gives_up_two_optimizers(order, raises_at, of, uses=False):
    training = TwoOptimizers(order)
    for _ in range(2):
        if hvd.rank() == 1:
            training.fails(raises_at, of)
        else:
            with pytest.raises(HorovodInternalError, match=raised_on(1)):
                training.chain(of=of).backward()
        if uses:  # each optimizer that the backward has reached refuses it, on all ranks
            for name in of:
                with pytest.raises(RuntimeError, match=r"zero_grad\(\)"):
                    training.optimizers[name].step()
        training.zero_grad()
        training.require_steps()
        training.make_step()


# What rank 1 has begun before it raises: of both, only of b, only of a.
@pytest.mark.ranks(2, 3)
@pytest.mark.mpis("openmpi", "mpich")
@pytest.mark.parametrize(
    ("order", "raises_at"), [("abab", 1), ("abab", 2), ("aabb", 2), ("bbaa", 2)]
)
def test_a_batch_of_two_optimizers_is_given_up_for_both(world, order, raises_at):
    world.run(one_gives_up_two_optimizers, order, raises_at, "ab", knobs=ONE_BY_ONE)


def test_and_neither_makes_a_step_with_it(world):
    world.run(one_gives_up_two_optimizers, "abab", 1, "ab", True, knobs=ONE_BY_ONE)


@pytest.mark.parametrize("of", ["a", "b"])
def test_an_optimizer_that_the_backward_does_not_reach_is_left_alone(world, of):
    world.run(one_gives_up_two_optimizers, "abab", 0, of, knobs=ONE_BY_ONE)


def all_give_up_two_optimizers(places):
    training = TwoOptimizers("abab")
    for _ in range(2):
        training.fails(places[hvd.rank()])
        training.zero_grad()
        training.require_steps()
        training.make_step()


@pytest.mark.parametrize("places", [(1, 2), (2, 1), (1, 1), (2, 2)])
def test_ranks_give_up_batches_of_which_they_have_begun_different_optimizers(world, places):
    world.run(all_give_up_two_optimizers, places, knobs=ONE_BY_ONE)


def given_up_at_random(seed):
    """Some ranks raise when they have begun b, or b and a; each rank takes its time."""
    training = TwoOptimizers("abab")
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
                training.chain().backward()
        for name in pace.sample("ab", 2):
            training.optimizers[name].zero_grad()
        training.require_steps()
    training.make_step()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("seed", [1, 2])
def test_whichever_ranks_give_up_what_all_go_on_alike(world, seed):
    world.run(given_up_at_random, seed, knobs=ONE_BY_ONE)


def given_up_with_gradients_of_the_script():
    """Rank 1 has not begun a, whose gradients it has set; so none of them belongs to the batch."""
    training = TwoOptimizers("abab")
    for _ in range(2):
        training.fails(1 + hvd.rank())
        if hvd.rank() == 1:
            for param in training.params["a"]:
                param.grad = torch.ones(1)
        training.optimizers["b"].zero_grad()
        if hvd.rank() == 1:
            assert [param.grad.item() for param in training.params["a"]] == [1, 1]
        training.zero_grad()
        training.require_steps()
        training.make_step()


@pytest.mark.parametrize("knobs", [{}, {"HVDLITE_DETERMINISTIC": "virtual:2"}])
def test_gradients_of_the_script_are_left_alone(world, knobs):
    world.run(given_up_with_gradients_of_the_script, knobs={**ONE_BY_ONE, **knobs})


def does_not_count():
    hvd.init()
    weight = hvd.rank() + 1
    a, b = two()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([a, b], lr=1.0), backward_passes_per_step=2
    )
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


def test_a_backward_that_raised_is_not_one_of_the_passes_per_step(world):
    world.run(does_not_count)


def leaves_a_gradient():
    hvd.init()
    weight = hvd.rank() + 1
    a, b = two()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a, b], lr=1.0))
    for _ in range(2):
        fails(a, b, weight)
        assert b.grad.item() == weight
        # Not zeroed, and not reached again.
        (a * weight).backward()
        mean = mean_over_ranks(lambda r: r + 1)
        assert (a.grad.item(), b.grad.item()) == (mean, mean)
        optimizer.step()
        optimizer.zero_grad()


def test_a_gradient_that_it_left_is_reduced_with_the_next_backward(world):
    world.run(leaves_a_gradient)
