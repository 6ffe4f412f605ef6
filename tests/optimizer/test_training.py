"""n ranks train as one process does on the joined batch."""

import pytest
import torch
from torch import nn

import hvdlite as hvd
from hvdlite.world import world as worlds
from tests.harness.on_ranks import on_ranks
from tests.optimizer import models

pytestmark = [pytest.mark.ranks(2), pytest.mark.mpis("mpich")]


@pytest.mark.mpis("openmpi", "mpich")
@pytest.mark.wide_in(7)  # each rank takes a second to import what torch's optimizers need
@pytest.mark.parametrize("make", models.OPTIMIZERS)
@on_ranks(1, 2, 3, 4, 7, hosts=("2,2", "1,2"), knobs=models.SMALL_BUCKETS)
def test_n_ranks_give_the_loss_curve_of_one_process_on_the_joined_batch(make):
    twins = models.Twins(models.OPTIMIZERS[make])
    curve = []
    for x, y in models.batches(40, 4, hvd.size()):
        twins.zero_grad()
        wanted, loss = twins.backward(x, y)
        models.assert_same_gradients(twins.net, twins.alone)
        twins.step()
        mean = hvd.allreduce(loss.detach())
        torch.testing.assert_close(mean, wanted.detach(), rtol=1e-9, atol=1e-12)
        curve.append(mean.item())
    assert curve[-1] < curve[0] / 2
    models.same_on_all_ranks(curve)


@pytest.mark.mpis("openmpi", "mpich")
@on_ranks(2, 3, 4, hosts=("2,2", "1,2"), knobs=models.SMALL_BUCKETS)
def test_parameters_stay_bitwise_equal_over_200_steps_and_a_run_repeats():
    first, second = models.model(torch.float32), models.model(torch.float32)
    for net in (first, second):
        optimizer = hvd.DistributedOptimizer(models.OPTIMIZERS["Adam"](net.parameters()))
        for step, (x, y) in enumerate(models.batches(200, 3, hvd.size(), torch.float32)):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            models.loss_of(net, *models.mine(x, y)).backward()
            optimizer.step()
            if step % 20 == 19:
                models.assert_bitwise_equal_on_all_ranks(net)
    assert all(map(torch.equal, first.parameters(), second.parameters()))


@on_ranks()
def test_schedulers_made_before_and_after_wrapping_drive_the_wrapper():
    schedulers = []

    def make(params):
        optimizer = models.SGD(params)
        schedulers.append(torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5))
        return optimizer

    twins = models.Twins(make)
    schedulers += [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for _, each in twins.both]
    for batch in models.batches(12, 2, hvd.size()):
        twins.train([batch])
        for scheduler in schedulers:
            scheduler.step()
    assert twins.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**12)


@pytest.mark.parametrize("how", ["backward_passes_per_step", "no_sync"])
@on_ranks(2, 3, knobs=models.SMALL_BUCKETS)
def test_gradients_of_several_backwards_are_summed_and_reduced_once(how):
    passes = 3 if how == "backward_passes_per_step" else 1
    twins = models.Twins(backward_passes_per_step=passes)
    data = list(models.batches(12, 2, hvd.size()))
    for first in range(0, 12, 3):
        twins.zero_grad(set_to_none=first % 2 == 0)
        for i in range(first, first + 3):
            if how == "no_sync" and i < first + 2:
                with twins.optimizer.no_sync():
                    twins.backward(*data[i])
            else:
                twins.backward(*data[i])
        models.assert_same_gradients(twins.net, twins.alone)
        twins.step()


OVERLAP = {
    "HVDLITE_EVENT_LOG": "10000",
    "HVDLITE_FIRST_BUCKET_BYTES": "100000",
    "HVDLITE_BUCKET_BYTES": "200000",
}


@pytest.mark.mpis("openmpi", "mpich")
@on_ranks(2, hosts=("1,1",), knobs=OVERLAP)
def test_the_first_bucket_is_done_before_the_last_gradient_of_the_same_backward():
    net = nn.Sequential(*[nn.Linear(200, 200) for _ in range(12)])
    optimizer = models.sgd(net.parameters(), lr=0.01)

    class WaitsForTheFirstBucket(torch.autograd.Function):
        """The gradient of the first layer is not made before the first bucket is done."""

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            while not is_done(0):
                pass
            assert not is_done(last)
            return grad

    def is_done(bucket):
        return any(
            state == "DONE" and name.endswith(f"bucket.{bucket}")
            for _, name, state in worlds.current().team.engine.events()[before:]
        )

    # The first round shows the order of the buckets.
    net(torch.randn(4, 200)).sum().backward()
    for _ in range(3):
        optimizer.step()
        optimizer.zero_grad()
        last = len(optimizer._hvdlite_reducer.gradients.buckets) - 1
        before = len(worlds.current().team.engine.events())
        x = WaitsForTheFirstBucket.apply(net[0](torch.randn(4, 200)))
        net[1:](x).square().sum().backward()
        assert is_done(last)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@on_ranks()
def test_a_compiled_model_trains_alike(backend):
    twins = models.Twins(nets=(models.model(), torch.compile(models.model(), backend=backend)))
    twins.train(models.batches(5, 2, hvd.size()))


@on_ranks()
def test_a_compiled_backward_does_not_trace_the_hooks():
    net = models.model()
    x = torch.ones(2, 6, dtype=torch.float64)
    frames = []  # that Dynamo looks at in a compiled step, of torch's optimizer and of ours
    for make in (torch.optim.SGD, models.sgd):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        optimizer = make(net.parameters(), lr=0.0)

        @torch.compile(backend="eager")
        def forward_and_backward():
            net(x * (hvd.rank() + 1)).square().mean().backward()

        for _ in range(3):
            forward_and_backward()
            optimizer.step()
            optimizer.zero_grad()
        frames.append(torch._dynamo.utils.counters["frames"]["total"])
    assert frames[0] == frames[1]
