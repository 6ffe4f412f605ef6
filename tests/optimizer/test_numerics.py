"""HVDLITE_CHECK_NUMERICS: which rank has a gradient that is not finite, in which parameter."""

import functools
import math
import re

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import hvdlite as hvd
from hvdlite.errors import NumericsError
from hvdlite.optimizer.checks.numerics import is_finite
from tests.harness.on_ranks import on_ranks
from tests.optimizer.models import batches, log, loss_of, mine, model, same_on_all_ranks, sgd

pytestmark = [pytest.mark.ranks(2), pytest.mark.mpis("mpich")]

ON = {"HVDLITE_CHECK_NUMERICS": "1"}
FINITE = "the loss there was finite, so it began in backward"
NOT_FINITE = "the loss there was not finite, so it began in forward"
UNKNOWN = "the loss there is not known"


class Poison(torch.autograd.Function):
    """Multiplies the gradient only."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def poisoned_loss(net, factor, x, y):
    """Of the first layer alone the gradients are poisoned."""
    return nn.functional.mse_loss(net[2:](Poison.apply(net[:2](x), factor)), y)


NAN, INFINITE = "NaN in the gradient of", "an infinite number in the gradient of"
TOO_LARGE = "a number too large for the compression in the gradient of"
FORMS = [
    ("gradient", math.nan, {}, f"{NAN} '0.bias'", f"(2 of its 6 gradients); {FINITE}"),
    # In Adasum's step the backward is over.
    ("gradient", math.nan, {"op": hvd.Adasum}, f"{NAN} '0.weight'", UNKNOWN),
    ("loss", math.nan, {}, f"{NAN} '4.bias'", NOT_FINITE),
    ("closure", math.nan, {}, f"{NAN} '0.bias'", FINITE),
    ("gradient", math.nan, {"shard": True}, f"{NAN} '0.", FINITE),
    ("shared", math.nan, {}, f"{NAN} '0.", FINITE),
    ("gradient", math.nan, {"free_gradients": True}, f"{NAN} '0.bias'", FINITE),
    ("gradient", 1e9, {"compression": hvd.Compression.fp16}, f"{TOO_LARGE} '0.bias'", FINITE),
]


@pytest.mark.wide_in(3)
@pytest.mark.parametrize(("kind", "value", "options", "what", "loss"), FORMS)
@on_ranks(1, 2, 3, hosts=("1,1",), knobs=ON)
def test_the_rank_the_parameter_and_the_step_are_named(kind, value, options, what, loss):
    """In its third step the last rank has values that are not finite."""
    last = hvd.size() - 1
    net = model(torch.float32)
    if kind == "shared":
        hvd.share_parameters(net)
    optimizer = sgd(net.parameters(), 0.1, net.named_parameters(), **options)
    texts = []
    for step, (x, y) in enumerate(batches(5, 2, hvd.size(), torch.float32)):
        factor = value if step == 2 and hvd.rank() == last else 1.0

        def closure(x=x, y=y, factor=factor):
            optimizer.zero_grad()
            loss = poisoned_loss(net, 1.0 if kind == "loss" else factor, *mine(x, y))
            loss = loss * factor if kind == "loss" else loss
            loss.backward()
            return loss

        before = [p.detach().clone() for p in net.parameters()]
        hvd.barrier()
        try:
            if kind == "closure":
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            texts.append("")
        except NumericsError as error:
            texts.append(str(error))
            hvd.barrier()
            assert all(map(torch.equal, before, net.parameters()))
    assert all(p.isfinite().all() for p in net.parameters())
    same_on_all_ranks(texts)
    assert [bool(text) for text in texts] == [False, False, True, False, False]
    start = f"DistributedOptimizer: step 3 has {what}"
    assert re.match(rf"{re.escape(start)}\S* on rank {last} \(", texts[2])
    assert loss in texts[2]
    assert texts[2].endswith(("No parameter has changed", "when the closure was called"))


@pytest.mark.parametrize("fused", [False, True])
@on_ranks(knobs=ON)
def test_a_step_that_grad_scaler_skips_is_one_line_of_rank_0(fused):
    """GradScaler finds that the first scale is too large, and skips that step."""
    net = model(torch.float32)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1, fused=fused)
    optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1e38, backoff_factor=1e-30)
    with log() as told:
        for x, y in batches(4, 2, hvd.size(), torch.float32):
            optimizer.zero_grad()
            scaler.scale(1e3 * loss_of(net, *mine(x, y))).backward()
            scaler.step(optimizer)
            scaler.update()
    assert all(p.isfinite().all() for p in net.parameters())
    assert len(told) == (hvd.rank() == 0)
    for text in told:
        assert text.startswith("DistributedOptimizer: step 1 has ")
        assert text.endswith(". No step was made with these gradients")


@pytest.mark.parametrize("earlier_pass", [False, True])
@on_ranks(knobs=ON)
def test_it_is_found_in_sparse_gradients(earlier_pass):
    net = nn.Embedding(5, 2, sparse=True)
    passes = 2 if earlier_pass else 1
    optimizer = sgd(net.parameters(), 0.1, net.named_parameters(), backward_passes_per_step=passes)
    for step in range(3):
        optimizer.zero_grad()
        factor = math.inf if step == hvd.rank() + 1 else 1.0
        for number in range(passes):
            rows = net(torch.tensor([step, 2]))
            Poison.apply(rows, 1.0 if number else factor).sum().backward()
        if step:
            with pytest.raises(NumericsError, match=f"{INFINITE} 'weight' on rank {step - 1}"):
                optimizer.step()
        else:
            optimizer.step()
    assert net.weight.isfinite().all()


@on_ranks(knobs=ON)
def test_in_a_later_call_of_a_closure_nothing_is_said_of_what_came_before():
    net = model(torch.float32)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=5), net.named_parameters()
    )
    ((x, y),) = batches(1, 2, hvd.size(), torch.float32)
    calls = []

    def closure():
        optimizer.zero_grad()
        calls.append(1)
        loss = poisoned_loss(net, math.nan if len(calls) == 3 else 1.0, *mine(x, y))
        loss.backward()
        return loss

    words = r"\. The parameters are as they were when the closure was called$"
    with pytest.raises(NumericsError, match=words):
        optimizer.step(closure)
    assert len(calls) == 3


@pytest.mark.parametrize(("kind", "loss"), [("checkpoint", NOT_FINITE), ("edge", UNKNOWN)])
@on_ranks(knobs=ON)
def test_the_loss_is_that_of_the_scripts_own_backward(kind, loss):
    """The loss of the last rank is NaN, or is not what backward is called on."""
    net = nn.Linear(3, 3)
    optimizer = sgd(net.parameters())
    x = torch.ones(2, 3, requires_grad=True)
    run = functools.partial(torch.utils.checkpoint.checkpoint, net, use_reentrant=True)
    y = (run if kind == "checkpoint" else net)(x).sum() * (math.nan if hvd.rank() else 1.0)
    if kind == "edge":
        torch.autograd.backward([torch.autograd.graph.get_gradient_edge(y)])
    else:
        y.backward()
    with pytest.raises(NumericsError, match=loss):
        optimizer.step()


class Unasked(torch.Tensor):
    def __bool__(self):
        raise AssertionError("the host waits for the device")


@on_ranks(knobs=ON)
def test_a_fused_optimizer_is_not_asked_whether_it_skips_the_step():
    net = nn.Linear(3, 3)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1, fused=True))
    net(torch.ones(2, 3)).sum().backward()
    optimizer.found_inf = torch.zeros(()).as_subclass(Unasked)  # as GradScaler does
    optimizer.step()


@on_ranks(knobs=ON)
def test_a_rank_without_weight_or_that_has_joined_does_not_count():
    """The NaN of a rank without samples does not count; a joined rank has none."""
    rank = hvd.rank()
    net = model()
    optimizer = sgd(net.parameters(), lr=0.1)
    for x, y in batches(2 + rank, 2, hvd.size()):
        optimizer.set_weight(rank)
        loss = loss_of(net, *mine(x, y))
        (loss if rank else loss * math.nan).backward()
        optimizer.step()
        optimizer.zero_grad()
    hvd.join()
    assert all(p.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
def test_one_number_that_is_not_finite_is_noticed_and_large_ones_are_not(dtype):
    large = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(large)
    assert is_finite(-large)
    for changed in ({500: math.nan}, {500: math.inf}, {0: math.inf, 1: -math.inf}):
        found = large.clone()
        for index, value in changed.items():
            found[index] = value
        assert not is_finite(found)
