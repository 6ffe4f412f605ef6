"""op=Adasum: each rank makes a step of its own, and then the changes are combined."""

import copy

import pytest
import torch
from torch import nn

import hvdlite as hvd
from tests.collectives.test_adasum import combined
from tests.harness.on_ranks import on_ranks
from tests.optimizer import models

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.mpis("mpich")]


def adasum(tensors):
    """By the formula."""
    found = combined([tensor.flatten().numpy() for tensor in tensors])
    return torch.from_numpy(found).reshape(tensors[0].shape)


def step_of_all(nets, optimizers):
    """What all ranks do, on this rank alone: as many models, each with its own optimizer."""
    starts = [copy.deepcopy(net).parameters() for net in nets]
    for optimizer in optimizers:
        optimizer.step()
    with torch.no_grad():
        for by_rank in zip(*(net.parameters() for net in nets), *starts, strict=True):
            params, before = by_rank[: len(nets)], by_rank[len(nets) :]
            deltas = [p - start for p, start in zip(params, before, strict=True)]
            for p in params:
                p.copy_(before[0] + adasum(deltas))


def follows_the_formula(make, passes, process_set):
    size = process_set.size()
    nets, net = [models.model() for _ in range(size)], models.model()
    optimizers = [models.OPTIMIZERS[make](each.parameters()) for each in nets]
    optimizer = hvd.DistributedOptimizer(
        models.OPTIMIZERS[make](net.parameters()),
        net.named_parameters(),
        op=hvd.Adasum,
        backward_passes_per_step=passes,
        process_set=process_set,
    )
    data = list(models.batches(6 * passes, 2, size))
    for first in range(0, len(data), passes):
        for one in (optimizer, *optimizers):
            one.zero_grad()
        for x, y in data[first : first + passes]:
            for r, other in enumerate(nets):
                models.loss_of(other, models.own(x, r, size), models.own(y, r, size)).backward()
            models.loss_of(net, *models.mine(x, y, of=process_set)).backward()
        # What is clipped is this rank's own.
        norms = [nn.utils.clip_grad_norm_(each.parameters(), 1.0) for each in nets]
        optimizer.synchronize()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        torch.testing.assert_close(norm, norms[process_set.rank()], rtol=1e-9, atol=1e-12)
        with optimizer.skip_synchronize():
            optimizer.step()
        step_of_all(nets, optimizers)
        # Adam makes much of the last digits of what is almost zero.
        models.assert_same_parameters(net, nets[0], rtol=1e-6, atol=1e-9)


@pytest.mark.wide_in(4)
@pytest.mark.parametrize("make", models.OPTIMIZERS)
@pytest.mark.parametrize("passes", [1, 2])
@on_ranks(1, 2, 3, 4, hosts=("2,1",))
def test_the_parameters_follow_the_formula_over_the_ranks_own_steps(make, passes):
    follows_the_formula(make, passes, hvd.global_process_set)


@pytest.mark.parametrize("members", [(0, 2), (1, 2)])
@on_ranks(3, 4)
def test_a_process_set_combines_the_steps_of_its_members(members):
    process_set = hvd.add_process_set(members)
    if process_set.included():
        follows_the_formula("Adam", 1, process_set)


@on_ranks()
def test_a_rank_that_does_not_change_a_parameter_adds_nothing():
    """The first is changed by rank 0 alone, the second by all, the third by nobody."""
    rank, size = hvd.rank(), hvd.size()
    a, b, c = (nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(3))
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = models.sgd([a, b, c, frozen], op=hvd.Adasum)
    directions = [torch.tensor([1.0, r], dtype=torch.float64) for r in range(size)]
    for _ in range(2):
        optimizer.zero_grad()
        loss = (b * directions[rank]).sum()
        (loss + 3 * a.sum() if rank == 0 else loss).backward()
        optimizer.step()
    assert a.tolist() == [-6.0, -6.0]
    torch.testing.assert_close(b.detach(), -2 * adasum(directions))
    assert c.tolist() == [0.0, 0.0]
    assert frozen.tolist() == [1.0, 1.0]


@on_ranks()
def test_a_closure_runs_within_the_ranks_own_step():
    p = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = models.sgd([p], lr=0.5, op=hvd.Adasum)
    target = torch.arange(3) + float(hvd.rank())
    alone = torch.zeros(3, dtype=torch.float64)

    def closure():
        optimizer.zero_grad()
        loss = ((p - target) ** 2).sum()
        loss.backward()
        return loss

    for step in range(3):
        wanted = float(((alone - target) ** 2).sum())
        loss = optimizer.step(closure) if step % 2 else optimizer.step(closure=closure)
        assert loss.item() == pytest.approx(wanted)
        alone += adasum([torch.arange(3) + float(r) - alone for r in range(hvd.size())])
        torch.testing.assert_close(p.detach(), alone)


@pytest.mark.parametrize(
    "compression", [hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16]
)
@on_ranks()
def test_parameters_of_any_kind_are_combined_compressed_or_not(compression):
    rank, size = hvd.rank(), hvd.size()
    table, params = nn.Embedding(4, 2, sparse=True), models.of_any_kind()
    optimizer = models.sgd([*params.values(), table.weight], op=hvd.Adasum, compression=compression)
    start = table.weight.detach().clone()
    (models.numbered(params.values(), rank) + table(torch.tensor([rank])).sum()).backward()
    optimizer.step()
    tolerance = 2e-2 if compression is hvd.Compression.bf16 else 1e-2
    for p in params.values():
        steps = [torch.arange(p.numel()).reshape(p.shape) + float(r) for r in range(size)]
        moved = (1 - p.detach()).real.double()
        torch.testing.assert_close(moved, adasum(steps), rtol=tolerance, atol=tolerance)
    # Rows of different ranks are orthogonal: Adasum adds them.
    wanted = torch.zeros(4, 2)
    wanted[:size] = 1
    torch.testing.assert_close(start - table.weight.detach(), wanted, rtol=0.0, atol=tolerance)


@pytest.mark.parametrize("how", ["plain", "unscaled", "fused"])
@on_ranks()
def test_a_rank_whose_gradients_overflow_adds_nothing_to_the_step(how):
    """GradScaler divides this rank's gradients, and lets the ranks step that overflow."""
    rank, size = hvd.rank(), hvd.size()
    p = nn.Parameter(torch.zeros(3))
    wrapped = torch.optim.SGD([p], lr=1.0, fused=how == "fused")
    optimizer = hvd.DistributedOptimizer(wrapped, op=hvd.Adasum)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    directions = [torch.tensor([1.0, r, 0.0]) for r in range(size)]
    expected = torch.zeros(3)
    for overflowing in ((), (size - 1,), tuple(range(size)), ()):
        optimizer.zero_grad()
        factor = float("inf") if rank in overflowing else 1.0
        scaler.scale((p * directions[rank]).sum() * factor).backward()
        if how == "unscaled":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        expected += adasum([-d * (r not in overflowing) for r, d in enumerate(directions)])
        torch.testing.assert_close(p.detach(), expected)
        models.assert_bitwise_equal_on_all_ranks(nn.ParameterList([p]))
    # Each rank's scale is its own.
    assert scaler.get_scale() == (256.0 if rank == size - 1 else 512.0)


@on_ranks()
def test_models_that_differ_are_an_error_that_changes_nothing():
    p, q = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3 + hvd.rank()))
    optimizer = models.sgd([p, q], names=[("p", p), ("q", q)], op=hvd.Adasum)
    for _ in range(2):
        (p.sum() + q.sum()).backward()
        with pytest.raises(hvd.HorovodInternalError) as caught:
            optimizer.step()
        text = models.same_on_all_ranks(str(caught.value))
        assert "parameter 1 differs: 'q' float32[3] on rank 0, 'q' float32[4] on rank 1" in text
        assert not p.any(), "the parameters are as before"


@on_ranks()
def test_it_outlives_shutdown_and_init_and_takes_new_parameters():
    """Another world, more parameters, and an optimizer of gradients before it."""
    p, q = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    former = models.sgd([p])
    optimizer = models.sgd([p], op=hvd.Adasum)
    for passes in (1, 3):
        optimizer.set_backward_passes_per_step(passes)
        assert optimizer.backward_passes_per_step == passes
        p.grad = None
        with optimizer.no_sync():
            (p * (hvd.rank() + 1)).backward()
        (p * (hvd.rank() + 1)).backward()
        assert p.grad.item() == 2 * (hvd.rank() + 1), "nothing is reduced by backward"
        optimizer.step()
        hvd.shutdown()
        hvd.init()
    optimizer.add_param_group({"params": [q], "lr": 2.0})
    optimizer.zero_grad()
    q.sum().backward()
    optimizer.step()
    # Equal deltas are averaged.
    assert q.item() == -2
    hvd.shutdown()
    with pytest.raises(ValueError, match="init"):
        optimizer.step()
    del former
    hvd.init()
