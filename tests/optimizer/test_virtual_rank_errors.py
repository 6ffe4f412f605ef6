"""Virtual ranks: what can't train alike on every number of ranks is an error."""

import contextlib
import warnings

import pytest
import torch
from torch import nn

import hvdlite as hvd
from hvdlite.errors import NumericsError

KNOBS = {"HVDLITE_DETERMINISTIC": "virtual:4"}


def starts():
    try:
        hvd.init()
    except ValueError as error:
        return str(error)
    return "it has started"


@pytest.mark.ranks(3)
@pytest.mark.above_mpi
def test_a_number_of_ranks_that_does_not_divide_them_is_an_error_of_init(world):
    (text,) = set(world.run(starts, knobs=KNOBS))
    assert text == (
        "HVDLITE_DETERMINISTIC=virtual:4: 3 ranks can't have the same number of the 4 virtual "
        "ranks; start one of these numbers: 1, 2, 4"
    )


@contextlib.contextmanager
def error(kind, words, missing):
    try:
        yield
    except kind as error:
        if words not in str(error):
            missing.append(f"{words}: got {error}")
    else:
        missing.append(f"{words}: no error")


def wrapped(**arguments):
    torch.manual_seed(3)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, hvd.DistributedOptimizer(optimizer, **arguments)


def refuses():
    hvd.init()
    missing = []
    for words, arguments in (
        ("backward_passes_per_step=3, but HVDLITE_DETERMINISTIC=virtual:4 makes a step of 2", {}),
        ("op=Adasum does not go with", {"op": hvd.Adasum}),
        ("compression does not go with", {"compression": hvd.Compression.bf16}),
        ("gradient_predivide_factor does not", {"gradient_predivide_factor": 2.0}),
        ("sparse_as_dense=True does not", {"sparse_as_dense": True}),
        ("shard=True does not", {"shard": True}),
        ("shard='host' does not", {"shard": "host"}),
    ):
        with error(ValueError, words, missing):
            wrapped(**(arguments or {"backward_passes_per_step": 3}))
    model, optimizer = wrapped(backward_passes_per_step=2)
    assert optimizer.backward_passes_per_step == 2
    optimizer.set_backward_passes_per_step(2)
    with error(ValueError, "backward_passes_per_step=1, but", missing):
        optimizer.set_backward_passes_per_step(1)
    with error(ValueError, "set_weight() does not go with", missing):
        optimizer.set_weight(3)
    with error(ValueError, "no_sync() does not go with", missing), optimizer.no_sync():
        pass
    with error(ValueError, "step(closure) does not go with", missing):
        optimizer.step(lambda: 0.0)
    with error(ValueError, "join: HVDLITE_DETERMINISTIC=virtual:4 trains alike", missing):
        hvd.join()
    with error(ValueError, "AsyncOptimizer does not go with", missing):
        hvd.AsyncOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of an experiment
        half_complex = torch.ones(2, dtype=torch.complex32)
    for param, words in (
        (half_complex, "'parameter 0' is complex32"),
        (torch.ones(2, device="meta"), "'parameter 0' is on meta"),
    ):
        with error(ValueError, words, missing):
            hvd.DistributedOptimizer(torch.optim.SGD([nn.Parameter(param)], lr=0.1))
    words = nn.Embedding(5, 2, sparse=True)
    _ = hvd.DistributedOptimizer(torch.optim.SGD(words.parameters(), lr=0.1))
    with error(ValueError, "the gradient of 'parameter 0' is sparse", missing):
        words(torch.tensor([1])).sum().backward()
    with error(ValueError, "has a graph (create_graph=True)", missing):
        model(torch.ones(1, 3)).square().sum().backward(create_graph=True)
    optimizer.zero_grad()
    return missing


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


def a_step_misses_nothing():
    hvd.init()
    missing = []
    model, optimizer = wrapped()
    start = model.weight.detach().clone()
    for virtual_rank in hvd.virtual_ranks():  # the first round is past what the ranks compare
        backward(model, virtual_rank)
    optimizer.zero_grad()

    backward(model, 0)
    with error(RuntimeError, "step after 1 of 2 micro-batches", missing):
        optimizer.step()
    optimizer.zero_grad()
    for _ in range(2):  # as a loop that zeroes too often
        optimizer.zero_grad()
        backward(model, 0)
    with error(RuntimeError, "step after 1 of 2 micro-batches", missing):
        optimizer.synchronize()
    words = "step() inside skip_synchronize() before"
    with error(RuntimeError, words, missing), optimizer.skip_synchronize():
        optimizer.step()
    optimizer.zero_grad()

    for fails_in in (0, 1):
        with contextlib.suppress(ArithmeticError):
            for micro_batch in range(2):
                backward(model, micro_batch, fails=micro_batch == fails_in)
        for go_on in (optimizer.step, lambda: backward(model, 1)):
            with error(RuntimeError, "the last backward() or step() raised", missing):
                go_on()
        optimizer.zero_grad()

    model.weight.grad = torch.ones_like(model.weight)
    with error(RuntimeError, "was set by the script", missing):
        optimizer.step()
    model.weight.grad = None
    optimizer.zero_grad()

    if not torch.equal(model.weight, start):
        missing.append("a step was made")
    for _ in range(2):
        for virtual_rank in hvd.virtual_ranks():
            backward(model, virtual_rank)
        with error(RuntimeError, "virtual_micro_batches() = 2 backward passes on", missing):
            backward(model, 0)
        optimizer.zero_grad()

    backward(model, 0)
    backward(model, 1)
    optimizer.step()  # and no zero_grad() after it
    with error(RuntimeError, "is still there from before the first micro-batch", missing):
        backward(model, 0)
    return missing


def sees_each_gradient():
    """A hook of the script, from before the optimizer; and sets of ranks."""
    hvd.init()
    missing, seen = [], []
    torch.manual_seed(3)
    model = nn.Linear(3, 2)
    model.bias.register_post_accumulate_grad_hook(lambda bias: seen.append(bias.grad.tolist()))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for virtual_rank in hvd.virtual_ranks():
        (model(torch.ones(1, 3)).sum() * virtual_rank).backward()
    first = 2 * hvd.rank()
    if seen != [[first] * 2, [first + 1] * 2] or model.bias.grad.tolist() != [1.5, 1.5]:
        missing.append(f"{seen} {model.bias.grad}")
    optimizer.step()
    # A hook that keeps what it puts there in one place.
    kept = nn.Parameter(torch.zeros(2))
    place = torch.zeros(2)

    def keeps(param):
        param.grad = place.copy_(param.grad)

    kept.register_post_accumulate_grad_hook(keeps)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([kept], lr=0.1))
    for virtual_rank in hvd.virtual_ranks():
        (kept.sum() * virtual_rank).backward()
    if kept.grad.tolist() != [1.5, 1.5]:
        missing.append(f"kept: {kept.grad}")
    optimizer.step()
    sets = [hvd.add_process_set([rank]) for rank in range(2)]
    own = sets[hvd.rank()]
    sizes = hvd.virtual_size(own), hvd.virtual_micro_batches(own), list(hvd.virtual_ranks(own))
    if sizes != (4, 4, [0, 1, 2, 3]) or hvd.virtual_size() != 4:
        missing.append(f"{sizes} {hvd.virtual_size()}")
    with error(ValueError, "is no member of process_set", missing):
        hvd.virtual_ranks(sets[1 - hvd.rank()])
    model, optimizer = wrapped(process_set=own)
    for virtual_rank in hvd.virtual_ranks(own):
        (model(torch.ones(1, 3)).sum() * virtual_rank).backward()
    if model.bias.grad.tolist() != [1.5, 1.5]:
        missing.append(f"in a set: {model.bias.grad}")
    optimizer.step()
    return missing


@pytest.mark.ranks(2)
@pytest.mark.above_mpi
@pytest.mark.parametrize("case", [refuses, a_step_misses_nothing, sees_each_gradient])
def test_what_does_not_go_with_them_is_an_error(world, case):
    assert world.run(case, knobs=KNOBS) == [[], []]


def finds_nan(dtype):
    hvd.init()
    torch.manual_seed(3)
    model = nn.Linear(3, 2).to(dtype)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    for virtual_rank in hvd.virtual_ranks():
        factor = float("nan") if virtual_rank == 2 else 1.0
        (model(torch.ones(1, 3, dtype=dtype)).sum() * factor).backward()
    try:
        optimizer.step()
    except NumericsError as error:
        return str(error)
    return "nothing"


@pytest.mark.ranks(2)
@pytest.mark.above_mpi
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_is_found_in_the_sum_of_its_rank(world, dtype):
    (text,) = set(world.run(finds_nan, dtype, knobs={**KNOBS, "HVDLITE_CHECK_NUMERICS": "1"}))
    assert "NaN in the gradient of" in text
    assert "on rank 1" in text


def goes_on_without_it(dtype):
    """The step after one with NaN does not reach that parameter."""
    hvd.init()
    always, once = (nn.Parameter(torch.ones(5, dtype=dtype)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([always, once], lr=0.1))
    found = []
    for step in range(5):
        optimizer.zero_grad()
        for _ in hvd.virtual_ranks():
            loss = always.sum()
            if step < 3:
                loss = loss + once.sum() * (float("nan") if step == 2 else 1.0)
            loss.backward()
        try:
            optimizer.step()
        except NumericsError:
            found.append(step)
    return found


@pytest.mark.ranks(2)
@pytest.mark.above_mpi
@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_what_is_not_finite_is_found_once(world, dtype):
    found = world.run(goes_on_without_it, dtype, knobs={**KNOBS, "HVDLITE_CHECK_NUMERICS": "1"})
    assert found == [[2], [2]]
