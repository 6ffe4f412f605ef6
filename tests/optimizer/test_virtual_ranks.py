"""With HVDLITE_DETERMINISTIC=virtual:V a training has the same bits on every number of ranks that
divides V: those of the tree over V micro-batches, whichever ranks compute them. What can't train
alike on every number of ranks is an error."""

import contextlib
import functools
import re
import warnings

import pytest
import torch
from torch import nn

import hvdlite as hvd
from hvdlite.errors import NumericsError
from hvdlite.optimizer.gradient_optimizer import GradientOptimizer
from tests.core import sum_tree
from tests.harness.on_ranks import on_ranks
from tests.optimizer.models import sgd

pytestmark = [pytest.mark.ranks(2), pytest.mark.above_mpi]

V = 4
KNOBS = {"HVDLITE_DETERMINISTIC": f"virtual:{V}", "HVDLITE_BUCKET_BYTES": "600"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Words(nn.Module):
    """An embedding, a convolution of strided weights, a parameter that only some micro-batches
    reach, one that none does, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 12)
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.last = nn.Linear(5, 3)
        self.sometimes = nn.Parameter(torch.randn(7))
        self.never = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, batch, reaches):
        image = self.words(batch).view(-1, 3, 4, 4)
        out = self.last(torch.relu(self.conv(image)).mean((2, 3))) * self.frozen
        loss = out.float().square().mean()
        return loss + self.sometimes.float().cos().sum() * batch[0, 0] if reaches else loss


def started(dtype):
    torch.manual_seed(7)
    return Words().to(dtype)


def batch_of(virtual_rank, step):
    generator = torch.Generator().manual_seed(1000 * step + virtual_rank)
    return torch.randint(11, (2, 4), generator=generator), (virtual_rank + step) % 3 == 0


def backwards(model, step, scaled):
    for virtual_rank in hvd.virtual_ranks():
        scaled(model(*batch_of(virtual_rank, step))).backward()


def oracle(model, step, scaled, op):
    """What `backwards` leaves in `.grad`: the sum over all micro-batches, along the tree."""
    params = [param for param in model.parameters() if param.requires_grad]
    losses = [scaled(model(*batch_of(virtual_rank, step))) for virtual_rank in range(V)]
    by_batch = [torch.autograd.grad(loss, params, allow_unused=True) for loss in losses]
    for param, grads in zip(params, zip(*by_batch, strict=True), strict=True):
        if any(grad is not None for grad in grads):
            filled = [torch.zeros_like(param) if grad is None else grad for grad in grads]
            param.grad = sum_tree.reduced(filled, op)


OPTIMIZERS = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.3, momentum=0.9, weight_decay=0.01),
    "Adam": functools.partial(torch.optim.Adam, lr=0.02, eps=1e-3),
}


def train(model, optimizer, compute):
    """Some steps, of which some clip, or fill `.grad` with zeros; and the parameters."""
    is_scaled = model.never.dtype is torch.float32
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=is_scaled)
    for step in range(5):
        compute(model, step, scaler.scale)
        skips = contextlib.nullcontext()
        if step == 2:
            scaler.unscale_(optimizer)
            if isinstance(optimizer, GradientOptimizer):
                optimizer.synchronize()
                skips = optimizer.skip_synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        with skips:
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    assert model.never.grad is None
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.wide_in(4, "2,2", "1,2,1")
@pytest.mark.parametrize(("name", "op"), [("SGD", "Sum"), ("Adam", "Average")])
@pytest.mark.parametrize("dtype", DTYPES)
@on_ranks(1, 2, 4, hosts=("1,1", "2,2", "1,2,1"), knobs=KNOBS)
def test_a_training_has_the_same_bits_on_every_number_of_ranks(dtype, name, op):
    alone, model = started(dtype), started(dtype)
    plain = OPTIMIZERS[name](alone.parameters())
    right = train(alone, plain, functools.partial(oracle, op=op))
    optimizer = OPTIMIZERS[name](model.parameters())
    optimizer = hvd.DistributedOptimizer(optimizer, op=getattr(hvd, op))
    got = train(model, optimizer, backwards)
    assert not torch.equal(got[0], started(dtype).words.weight), "nothing is trained"
    assert all(map(torch.equal, got, right))


# By the size of a parameter, the micro-batches that do not reach it.
LACKS = {70: (2, 3), 4000: (), 333: (2,), 1: (0, 1, 3)}


def draw(virtual_rank, size, dtype):
    """Sums of these depend on their order."""
    if virtual_rank in LACKS[size]:
        return torch.zeros(size, dtype=dtype)
    return sum_tree.draw(virtual_rank, size, dtype)


@pytest.mark.wide_in(1, 4, "2,2", "1,2,1")
@pytest.mark.parametrize("op", ["Average", "Sum"])
@pytest.mark.parametrize("dtype", DTYPES)
@on_ranks(1, 2, 4, hosts=("1,1", "2,2", "1,2,1"), knobs=KNOBS)
def test_a_gradient_has_the_bits_of_the_tree_over_all_micro_batches(dtype, op):
    params = {size: nn.Parameter(torch.zeros(size, dtype=dtype)) for size in LACKS}
    optimizer = sgd(params.values(), op=getattr(hvd, op))
    last = hvd.virtual_ranks()[-1]
    for _ in range(2):  # the buckets may be others in the second one
        for number in hvd.virtual_ranks():
            reached = [size for size in LACKS if number not in LACKS[size]]
            sum((params[size] * draw(number, size, dtype)).sum() for size in reached).backward()
            assert number == last or all(param.grad is None for param in params.values())
        for size, param in params.items():
            given = [draw(number, size, dtype) for number in range(V)]
            right, folded = sum_tree.reduced(given, op), functools.reduce(torch.add, given)
            assert sum_tree.same_bits(param.grad, right), size
            folded = folded / V if op == "Average" else folded
            assert size < 4000 or not torch.equal(right, folded), "the order makes no difference"
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(knobs=KNOBS)
def test_hooks_of_the_script_see_each_gradient_and_may_put_it_elsewhere():
    param, kept = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    seen, place = [], torch.zeros(2)

    def keeps(kept):
        kept.grad = place.copy_(kept.grad)

    param.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.tolist()))
    kept.register_post_accumulate_grad_hook(keeps)
    optimizer = sgd([param, kept])
    for virtual_rank in hvd.virtual_ranks():
        ((param + kept).sum() * virtual_rank).backward()
    assert seen == [[number] * 2 for number in hvd.virtual_ranks()]
    optimizer.step()
    assert param.tolist() == kept.tolist() == [-1.5, -1.5]


@on_ranks(knobs=KNOBS)
def test_a_set_of_ranks_has_all_virtual_ranks():
    sets = [hvd.add_process_set([rank]) for rank in range(2)]
    own, other = sets[:: 1 if hvd.rank() == 0 else -1]
    assert (hvd.virtual_size(), hvd.virtual_size(own), hvd.virtual_micro_batches(own)) == (4, 4, 4)
    assert list(hvd.virtual_ranks(own)) == [0, 1, 2, 3]
    with error(ValueError, "is no member of process_set"):
        hvd.virtual_ranks(other)
    model, optimizer = linear(process_set=own)
    for virtual_rank in hvd.virtual_ranks(own):
        (model(torch.ones(1, 3)).sum() * virtual_rank).backward()
    assert model.bias.grad.tolist() == [1.5, 1.5]
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(knobs={**KNOBS, "HVDLITE_CHECK_NUMERICS": "1"})
def test_a_gradient_that_is_not_finite_is_found_once_in_the_sum_of_its_rank(dtype):
    """The steps after the one with NaN do not reach that parameter."""
    always, once = (nn.Parameter(torch.ones(5, dtype=dtype)) for _ in range(2))
    optimizer = sgd([always, once])
    for step in range(5):
        optimizer.zero_grad()
        for virtual_rank in hvd.virtual_ranks():
            factor = float("nan") if (step, virtual_rank) == (2, 2) else 1.0
            (always.sum() + (once.sum() * factor if step < 3 else 0.0)).backward()
        if step == 2:
            with pytest.raises(NumericsError, match=r"NaN in the gradient of .* on rank 1"):
                optimizer.step()
        else:
            optimizer.step()


def starts():
    try:
        hvd.init()
    except ValueError as error:
        return str(error)
    return "it has started"


@pytest.mark.ranks(3)
def test_a_number_of_ranks_that_does_not_divide_them_is_an_error_of_init(world):
    (text,) = set(world.run(starts, knobs=KNOBS))
    assert text.startswith("HVDLITE_DETERMINISTIC=virtual:4: 3 ranks can't")
    assert text.endswith("start one of these numbers: 1, 2, 4")


def error(kind, words):
    return pytest.raises(kind, match=re.escape(words))


def linear(**options):
    model = nn.Linear(3, 2)
    return model, sgd(model.parameters(), lr=0.1, **options)


@on_ranks(knobs=KNOBS)
def test_what_does_not_go_with_them_is_an_error():
    for words, arguments in (
        (
            "=3, but HVDLITE_DETERMINISTIC=virtual:4 makes a step of 2",
            {"backward_passes_per_step": 3},
        ),
        ("op=Adasum does not go with", {"op": hvd.Adasum}),
        ("compression does not go with", {"compression": hvd.Compression.bf16}),
        ("gradient_predivide_factor does not", {"gradient_predivide_factor": 2.0}),
        ("sparse_as_dense=True does not", {"sparse_as_dense": True}),
        ("shard=True does not", {"shard": True}),
        ("shard='host' does not", {"shard": "host"}),
    ):
        with error(ValueError, words):
            linear(**arguments)
    model, optimizer = linear(backward_passes_per_step=2)
    plain = torch.optim.SGD(model.parameters())
    assert optimizer.backward_passes_per_step == 2
    optimizer.set_backward_passes_per_step(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of an experiment
        half_complex = torch.ones(2, dtype=torch.complex32)
    for words, call in (
        ("backward_passes_per_step=1, but", lambda: optimizer.set_backward_passes_per_step(1)),
        ("set_weight() does not go with", lambda: optimizer.set_weight(3)),
        ("no_sync() does not go with", lambda: optimizer.no_sync().__enter__()),
        ("step(closure) does not go with", lambda: optimizer.step(lambda: 0.0)),
        ("join: HVDLITE_DETERMINISTIC=virtual:4 trains alike", hvd.join),
        ("AsyncOptimizer does not go", lambda: hvd.AsyncOptimizer(plain)),
        ("'parameter 0' is complex32", lambda: sgd([nn.Parameter(half_complex)])),
        ("'parameter 0' is on meta", lambda: sgd([nn.Parameter(torch.ones(2, device="meta"))])),
    ):
        with error(ValueError, words):
            call()
    words = nn.Embedding(5, 2, sparse=True)
    _ = sgd(words.parameters())
    with error(ValueError, "the gradient of 'parameter 0' is sparse"):
        words(torch.tensor([1])).sum().backward()
    with error(ValueError, "has a graph (create_graph=True)"):
        model(torch.ones(1, 3)).square().sum().backward(create_graph=True)
    optimizer.zero_grad()


def backward(model, micro_batch, fails=False):
    batch = torch.full((1, 3), 1.0 + micro_batch, requires_grad=True)
    model(Fails.apply(batch) if fails else batch).square().sum().backward()


class Fails(torch.autograd.Function):
    """Its backward raises, when the other gradients are there."""

    @staticmethod
    def forward(ctx, x):
        return x.detach().clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("on purpose")


@on_ranks(knobs=KNOBS)
def test_a_step_misses_no_micro_batch_and_has_none_twice():
    model, optimizer = linear()
    start = model.weight.detach().clone()
    for virtual_rank in hvd.virtual_ranks():  # the first round is past what the ranks compare
        backward(model, virtual_rank)
    optimizer.zero_grad()

    backward(model, 0)
    with error(RuntimeError, "step after 1 of 2 micro-batches"):
        optimizer.step()
    for _ in range(2):  # as a loop that zeroes too often
        optimizer.zero_grad()
        backward(model, 0)
    with error(RuntimeError, "step after 1 of 2 micro-batches"):
        optimizer.synchronize()
    with error(RuntimeError, "step() inside skip_synchronize() before"):  # noqa: SIM117
        with optimizer.skip_synchronize():
            optimizer.step()
    optimizer.zero_grad()

    for fails_in in (0, 1):
        with contextlib.suppress(ArithmeticError):
            for micro_batch in range(2):
                backward(model, micro_batch, fails=micro_batch == fails_in)
        with error(RuntimeError, "the last backward() or step() raised"):
            optimizer.step()
        with error(RuntimeError, "the last backward() or step() raised"):
            backward(model, 1)
        optimizer.zero_grad()

    model.weight.grad = torch.ones_like(model.weight)
    with error(RuntimeError, "was set by the script"):
        optimizer.step()
    model.weight.grad = None
    optimizer.zero_grad()
    assert torch.equal(model.weight, start), "no step was made"

    for _ in range(2):
        for virtual_rank in hvd.virtual_ranks():
            backward(model, virtual_rank)
        with error(RuntimeError, "virtual_micro_batches() = 2 backward passes on"):
            backward(model, 0)
        optimizer.zero_grad()

    backward(model, 0)
    backward(model, 1)
    optimizer.step()  # and no zero_grad() after it
    with error(RuntimeError, "is still there from before the first micro-batch"):
        backward(model, 0)
