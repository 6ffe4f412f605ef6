"""HVDLITE_CHECK_NUMERICS: which rank has a gradient that is not finite, in which parameter."""

import math
import warnings

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import hvdlite as hvd
from hvdlite.errors import NumericsError
from hvdlite.optimizer.checks.numerics import is_finite
from tests.optimizer.models import batches, loss_of, model, own
from tests.optimizer.test_same_values import Records

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


def poisoned(kind, value, options):
    """In its third step the last rank has values that are not finite. The texts by step."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    net = model(torch.float32)
    if kind == "shared":
        hvd.share_parameters(net)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), **options
    )
    texts = []
    for step, (x, y) in enumerate(batches(5, 2, size, torch.float32)):
        x, y = own(x, rank, size), own(y, rank, size)
        bad = step == 2 and rank == size - 1

        def loss():
            optimizer.zero_grad()
            factor = value if bad and kind != "loss" else 1.0  # noqa: B023
            hidden = Poison.apply(net[:2](x), factor)  # noqa: B023
            loss = nn.functional.mse_loss(net[2:](hidden), y)  # noqa: B023
            loss = loss * value if bad and kind == "loss" else loss  # noqa: B023
            loss.backward()
            return loss

        before = [p.detach().clone() for p in net.parameters()]
        hvd.barrier()
        try:
            if kind == "closure":
                optimizer.step(loss)
            else:
                loss()
                optimizer.step()
            texts.append("")
        except NumericsError as error:
            texts.append(str(error))
            hvd.barrier()
            assert all(map(torch.equal, before, net.parameters()))
    assert all(p.isfinite().all() for p in net.parameters())
    return texts


def expect(world, texts, what, loss):
    assert texts == [texts[0]] * world.size
    assert [bool(text) for text in texts[0]] == [False, False, True, False, False]
    start = f"DistributedOptimizer: step 3 has {what} on rank {world.size - 1} ("
    assert texts[0][2].startswith(start)
    assert f"; {loss}" in texts[0][2]
    assert texts[0][2].endswith(". No parameter has changed")


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.hosts("1,1")
@pytest.mark.parametrize("options", [{}, {"op": hvd.Adasum}])
def test_the_rank_the_parameter_and_the_step_are_named(world, options):
    texts = world.run(poisoned, "gradient", math.nan, options, knobs=ON)
    # In Adasum's step the backward is over.
    first, loss = ("0.weight", UNKNOWN) if options else ("0.bias", FINITE)
    expect(world, texts, f"NaN in the gradient of '{first}'", loss)
    assert "(2 of its 6 gradients)" in texts[0][2]


FORMS = [
    ("loss", math.inf, {}, "an infinite number in the gradient of '4.bias'", NOT_FINITE),
    ("closure", math.inf, {}, "an infinite number in the gradient of '0.bias'", FINITE),
    ("gradient", math.nan, {"shard": True}, "NaN in the gradient of '0.", FINITE),
    ("shared", math.nan, {}, "NaN in the gradient of '0.", FINITE),
    ("gradient", math.nan, {"free_gradients": True}, "NaN in the gradient of '0.bias'", FINITE),
    (
        "gradient",
        1e9,
        {"compression": hvd.Compression.fp16},
        "a number too large for the compression in the gradient of '0.bias'",
        FINITE,
    ),
]


@pytest.mark.parametrize(("kind", "value", "options", "what", "loss"), FORMS)
def test_it_is_found_in_every_form(world, kind, value, options, what, loss):
    texts = world.run(poisoned, kind, value, options, knobs=ON)
    assert texts == [texts[0]] * 2
    assert [bool(text) for text in texts[0]] == [False, False, True, False, False]
    assert texts[0][2].startswith(f"DistributedOptimizer: step 3 has {what}")
    assert loss in texts[0][2]


def test_nothing_is_said_of_finite_gradients(world):
    assert world.run(poisoned, "none", 1.0, {}, knobs=ON) == [[""] * 5] * 2


def scaled(fused):
    """GradScaler finds that the first scale is too large, and skips that step."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    net = model(torch.float32)
    make = torch.optim.Adam(net.parameters(), lr=0.1, fused=fused)
    optimizer = hvd.DistributedOptimizer(make, net.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1e38, backoff_factor=1e-30)
    with Records() as told:
        for x, y in batches(4, 2, size, torch.float32):
            optimizer.zero_grad()
            scaler.scale(1e3 * loss_of(net, own(x, rank, size), own(y, rank, size))).backward()
            scaler.step(optimizer)
            scaler.update()
    assert all(p.isfinite().all() for p in net.parameters())
    return told


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_grad_scaler_skips_is_one_line_of_rank_0(world, fused):
    first, second = world.run(scaled, fused, knobs=ON)
    assert second == []
    (text,) = first
    assert text.startswith("DistributedOptimizer: step 1 has ")
    assert text.endswith(". No step was made with these gradients")


def in_sparse_rows():
    hvd.init()
    net = nn.Embedding(5, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters()
    )
    for step in range(3):
        optimizer.zero_grad()
        factor = math.inf if step == hvd.rank() + 1 else 1.0
        Poison.apply(net(torch.tensor([step, 2])), factor).sum().backward()
        if step:
            match = f"an infinite number in the gradient of 'weight' on rank {step - 1}"
            with pytest.raises(NumericsError, match=match):
                optimizer.step()
        else:
            optimizer.step()


def test_it_is_found_in_sparse_gradients(world):
    with warnings.catch_warnings():
        world.run(in_sparse_rows, knobs=ON)


def in_accumulated_rows():
    hvd.init()
    net = nn.Embedding(5, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters()
    )
    with optimizer.no_sync():
        Poison.apply(net(torch.tensor([1, 2])), math.nan if hvd.rank() else 1.0).sum().backward()
    with pytest.raises(NumericsError, match="NaN in the gradient of 'weight' on rank 1"):
        optimizer.step()
    assert net.weight.isfinite().all()


def test_it_is_found_in_sparse_gradients_of_earlier_backward_passes(world):
    with warnings.catch_warnings():
        world.run(in_accumulated_rows, knobs=ON)


def in_a_later_call_of_a_closure():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    net = model(torch.float32)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=5), net.named_parameters()
    )
    ((x, y),) = batches(1, 2, size, torch.float32)
    calls = []

    def closure():
        optimizer.zero_grad()
        calls.append(1)
        hidden = Poison.apply(net[:2](own(x, rank, size)), math.nan if len(calls) == 3 else 1.0)
        loss = nn.functional.mse_loss(net[2:](hidden), own(y, rank, size))
        loss.backward()
        return loss

    with pytest.raises(NumericsError) as raised:
        optimizer.step(closure)
    return len(calls), str(raised.value)


def test_in_a_later_call_of_a_closure_nothing_is_said_of_what_came_before(world):
    for calls, text in world.run(in_a_later_call_of_a_closure, knobs=ON):
        assert calls == 3
        assert text.endswith(". The parameters are as they were when the closure was called")


def begun_by(kind):
    """The loss of the last rank is NaN, or is not what backward is called on."""
    hvd.init()
    net = nn.Linear(3, 3)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters()
    )
    x = torch.ones(2, 3, requires_grad=True)
    if kind == "checkpoint":
        y = torch.utils.checkpoint.checkpoint(net, x, use_reentrant=True)
    else:
        y = net(x)
    loss = y.sum() * (math.nan if hvd.rank() else 1.0)
    if kind == "edge":
        torch.autograd.backward([torch.autograd.graph.get_gradient_edge(loss)])
    else:
        loss.backward()
    with pytest.raises(NumericsError) as raised:
        optimizer.step()
    return str(raised.value)


@pytest.mark.parametrize(("kind", "loss"), [("checkpoint", NOT_FINITE), ("edge", UNKNOWN)])
def test_the_loss_is_that_of_the_scripts_own_backward(world, kind, loss):
    first, second = world.run(begun_by, kind, knobs=ON)
    assert first == second
    assert loss in first


class Unasked(torch.Tensor):
    def __bool__(self):
        raise AssertionError("the host waits for the device")


def of_a_fused_optimizer():
    hvd.init()
    net = nn.Linear(3, 3)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1, fused=True))
    net(torch.ones(2, 3)).sum().backward()
    optimizer.found_inf = torch.zeros(()).as_subclass(Unasked)  # as GradScaler does
    optimizer.step()


def test_a_fused_optimizer_is_not_asked_whether_it_skips_the_step(world):
    world.run(of_a_fused_optimizer)


def of_no_weight():
    """The NaN of a rank without samples does not count; a joined rank has none."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    net = model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters()
    )
    for x, y in batches(2 + rank, 2, size):
        optimizer.set_weight(rank)
        loss = loss_of(net, own(x, rank, size), own(y, rank, size))
        (loss if rank else loss * math.nan).backward()
        optimizer.step()
        optimizer.zero_grad()
    hvd.join()
    assert all(p.isfinite().all() for p in net.parameters())


def test_a_rank_without_weight_or_that_has_joined_does_not_count(world):
    world.run(of_no_weight, knobs=ON)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
def test_one_number_that_is_not_finite_is_noticed_and_large_ones_are_not(dtype):
    large = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(large)
    assert is_finite(-large)
    for value in (math.nan, math.inf, -math.inf):
        changed = large.clone()
        changed[500] = value
        assert not is_finite(changed)
    changed = torch.zeros(4, dtype=dtype)
    changed[0], changed[1] = math.inf, -math.inf
    assert not is_finite(changed)
