"""n ranks train as one process does on the joined batch."""

import io

import pytest
import torch
from torch import nn

import hvdlite as hvd
from hvdlite.world import world as worlds
from tests.optimizer.models import (
    assert_bitwise_equal_on_all_ranks,
    assert_same_parameters,
    batches,
    loss_of,
    model,
    own,
)

SMALL_BUCKETS = {"HVDLITE_BUCKET_BYTES": "1500", "HVDLITE_FIRST_BUCKET_BYTES": "100"}

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
}


def loss_curves(make, steps=40):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    alone, net = model(), model()
    reference = OPTIMIZERS[make](alone.parameters())
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[make](net.parameters()), net.named_parameters())
    curve = []
    for x, y in batches(steps, 4, size):
        reference.zero_grad()
        wanted = loss_of(alone, x, y)
        wanted.backward()
        reference.step()
        optimizer.zero_grad()
        loss = loss_of(net, own(x, rank, size), own(y, rank, size))
        loss.backward()
        for p, q in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)
        optimizer.step()
        mean = hvd.allreduce(loss.detach())
        torch.testing.assert_close(mean, wanted.detach(), rtol=1e-9, atol=1e-12)
        curve.append(mean.item())
    assert_same_parameters(net, alone)
    assert curve[-1] < curve[0] / 2
    return curve


@pytest.mark.ranks(1, 2, 3, 4, 7)
@pytest.mark.hosts("2,2", "1,2")
@pytest.mark.wide_in(7)  # each rank takes a second to import what torch's optimizers need
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_n_ranks_give_the_loss_curve_of_one_process_on_the_joined_batch(world, make):
    curves = world.run(loss_curves, make, knobs=SMALL_BUCKETS)
    assert all(curve == curves[0] for curve in curves)


def many_steps():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    net = model(torch.float32)
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(net.parameters(), lr=0.01))
    for step, (x, y) in enumerate(batches(200, 3, size, torch.float32)):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss_of(net, own(x, rank, size), own(y, rank, size)).backward()
        optimizer.step()
        if step % 20 == 19:
            assert_bitwise_equal_on_all_ranks(net)
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()]).tolist()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.hosts("2,2", "1,2")
def test_parameters_stay_bitwise_equal_over_200_steps_and_a_run_repeats(world):
    first = world.run(many_steps, knobs=SMALL_BUCKETS)
    assert first == world.run(many_steps, knobs=SMALL_BUCKETS)


def schedules(when):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    alone, net = model(), model()

    def both(optimizer):
        return [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        ]

    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    schedulers = both(reference)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if when == "before":
        own_schedulers = both(optimizer)
        optimizer = hvd.DistributedOptimizer(optimizer)
    else:
        optimizer = hvd.DistributedOptimizer(optimizer)
        own_schedulers = both(optimizer)
    for x, y in batches(12, 2, size):
        reference.zero_grad()
        loss_of(alone, x, y).backward()
        reference.step()
        optimizer.zero_grad()
        loss_of(net, own(x, rank, size), own(y, rank, size)).backward()
        optimizer.step()
        for scheduler in schedulers + own_schedulers:
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
    assert optimizer.param_groups[0]["lr"] < 0.1
    assert_same_parameters(net, alone)


@pytest.mark.ranks(2)
@pytest.mark.mpis("mpich")
@pytest.mark.parametrize("when", ["before", "after"])
def test_schedulers_made_before_or_after_wrapping_drive_the_wrapper(world, when):
    world.run(schedules, when)


def accumulates(how):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    alone, net = model(), model()
    reference = torch.optim.SGD(alone.parameters(), lr=0.02)
    passes = 3 if how == "backward_passes_per_step" else 1
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.02), backward_passes_per_step=passes
    )
    data = list(batches(12, 2, size))
    for first in range(0, 12, 3):
        reference.zero_grad()
        optimizer.zero_grad(set_to_none=first % 2 == 0)
        for i in range(first, first + 3):
            x, y = data[i]
            loss_of(alone, x, y).backward()
            loss = loss_of(net, own(x, rank, size), own(y, rank, size))
            if how == "no_sync" and i < first + 2:
                with optimizer.no_sync():
                    loss.backward()
            else:
                loss.backward()
        for p, q in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)
        reference.step()
        optimizer.step()
    assert_same_parameters(net, alone)


@pytest.mark.ranks(2, 3)
@pytest.mark.mpis("mpich")
@pytest.mark.parametrize("how", ["backward_passes_per_step", "no_sync"])
def test_gradients_of_several_backwards_are_summed_and_reduced_once(world, how):
    world.run(accumulates, how, knobs=SMALL_BUCKETS)


def resumes(tmp):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    data = list(batches(10, 2, size))

    def train(net, optimizer, part):
        for x, y in part:
            optimizer.zero_grad()
            loss_of(net, own(x, rank, size), own(y, rank, size)).backward()
            optimizer.step()

    def make(seed):
        net = model()
        with torch.no_grad():
            for p in net.parameters():
                p.add_(seed)
        return net, hvd.DistributedOptimizer(torch.optim.Adam(net.parameters(), lr=0.01))

    net, optimizer = make(0)
    train(net, optimizer, data[:5])
    checkpoint = io.BytesIO()
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)
    train(net, optimizer, data[5:])

    resumed, other = make(rank)
    if rank == 0:
        checkpoint.seek(0)
        saved = torch.load(checkpoint)
        resumed.load_state_dict(saved["model"])
        other.load_state_dict(saved["optimizer"])
    hvd.broadcast_parameters(resumed.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(other, root_rank=0)
    train(resumed, other, data[5:])
    for p, q in zip(net.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.ranks(2, 3)
@pytest.mark.mpis("mpich")
def test_training_resumes_from_a_checkpoint_that_only_the_root_has(world):
    world.run(resumes, None)


def overlaps():
    hvd.init()
    torch.manual_seed(1)
    net = nn.Sequential(*[nn.Linear(200, 200) for _ in range(12)])
    at_the_last_gradient = []
    # Registered first, so it runs before the optimizer's own.
    net[0].weight.register_post_accumulate_grad_hook(lambda _: at_the_last_gradient.extend(now()))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.01))

    class WaitsForTheFirstBucket(torch.autograd.Function):
        """The gradient of the first layer is not made before the first bucket is done."""

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            while not any(
                name.endswith("bucket.0") and state == "DONE" for _, name, state in now()
            ):
                pass
            return grad

    def now():
        return worlds.current().team.engine.events()[before:]

    # The ranks' agreement on the plans has events too: it is over after a step.
    before = 0
    net(torch.randn(4, 200)).sum().backward()
    optimizer.step()
    for _ in range(3):
        optimizer.zero_grad()
        before = len(worlds.current().team.engine.events())
        at_the_last_gradient.clear()
        x = WaitsForTheFirstBucket.apply(net[0](torch.randn(4, 200)))
        net[1:](x).square().sum().backward()
        optimizer.step()
        done = [name for _, name, state in at_the_last_gradient if state == "DONE"]
        assert any(name.endswith("bucket.0") for name in done)
        last = max(int(name.rpartition(".")[2]) for _, name, _ in now())
        assert not any(name.endswith(f"bucket.{last}") for name in done)


@pytest.mark.ranks(2)
@pytest.mark.hosts("1,1")
def test_the_first_bucket_is_done_before_the_last_gradient_of_the_same_backward(world):
    knobs = {"HVDLITE_EVENT_LOG": "10000", "HVDLITE_FIRST_BUCKET_BYTES": "100000"}
    world.run(overlaps, knobs={**knobs, "HVDLITE_BUCKET_BYTES": "200000"})


def compiles(backend):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    alone, net = model(), model()
    compiled = torch.compile(net, backend=backend)
    reference = torch.optim.SGD(alone.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(compiled.parameters(), lr=0.05), compiled.named_parameters()
    )
    for x, y in batches(5, 2, size):
        reference.zero_grad()
        loss_of(alone, x, y).backward()
        reference.step()
        optimizer.zero_grad()
        loss_of(compiled, own(x, rank, size), own(y, rank, size)).backward()
        optimizer.step()
    assert_same_parameters(net, alone)


@pytest.mark.ranks(2)
@pytest.mark.mpis("mpich")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_trains_alike(world, backend):
    world.run(compiles, backend)


def compiled_step():
    """How many frames Dynamo looks at in a compiled step, of torch's optimizer and of ours."""
    hvd.init()
    net = model()
    x = torch.ones(2, 6, dtype=torch.float64)
    frames = []
    for wraps in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        if wraps:
            optimizer = hvd.DistributedOptimizer(optimizer)

        @torch.compile(backend="eager")
        def forward_and_backward():
            net(x * (hvd.rank() + 1)).square().mean().backward()

        for _ in range(3):
            forward_and_backward()
            optimizer.step()
            optimizer.zero_grad()
        frames.append(torch._dynamo.utils.counters["frames"]["total"])
    return frames


@pytest.mark.ranks(2)
@pytest.mark.mpis("mpich")
def test_a_compiled_backward_does_not_trace_the_hooks(world):
    for of_torch, of_ours in world.run(compiled_step):
        assert of_ours == of_torch
