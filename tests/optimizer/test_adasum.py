"""op=Adasum: each rank makes a step of its own, and then the changes are combined."""

import copy

import pytest
import torch
from torch import nn

import hvdlite as hvd
from tests.optimizer.models import (
    assert_bitwise_equal_on_all_ranks,
    assert_same_parameters,
    batches,
    loss_of,
    model,
    own,
)

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.mpis("mpich")]


def pair(a, b):
    dot, aa, bb = (torch.dot(x.flatten(), y.flatten()) for x, y in ((a, b), (a, a), (b, b)))
    if not aa or not bb:
        return a + b
    return (1 - dot / (2 * aa)) * a + (1 - dot / (2 * bb)) * b


def adasum(tensors):
    """The formula, in the order of the contract."""
    power = 1
    while 2 * power <= len(tensors):
        power *= 2
    values = list(tensors[:power])
    for r, tensor in enumerate(tensors[power:]):
        values[r] = pair(values[r], tensor)
    while len(values) > 1:
        values = [pair(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


class AllRanks:
    """What all ranks do, on this rank alone: as many models, each with its own optimizer."""

    def __init__(self, make, size):
        self.nets = [model() for _ in range(size)]
        self.optimizers = [make(net) for net in self.nets]

    def step(self):
        starts = [copy.deepcopy(net.state_dict()) for net in self.nets]
        for optimizer in self.optimizers:
            optimizer.step()
        deltas = [
            {name: p.detach() - start[name] for name, p in net.named_parameters()}
            for net, start in zip(self.nets, starts, strict=True)
        ]
        with torch.no_grad():
            for net in self.nets:
                for name, p in net.named_parameters():
                    p.copy_(starts[0][name] + adasum([delta[name] for delta in deltas]))


MAKE = {
    "SGD": lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
    "Adam": lambda net: torch.optim.Adam(net.parameters(), lr=0.01),
}


def by_the_formula(make, passes, members):
    hvd.init()
    process_set = hvd.add_process_set(members) if members else hvd.global_process_set
    try:
        if not process_set.included():
            return
        rank, size = process_set.rank(), process_set.size()
        everyone, net = AllRanks(MAKE[make], size), model()
        optimizer = hvd.DistributedOptimizer(
            MAKE[make](net),
            net.named_parameters(),
            op=hvd.Adasum,
            backward_passes_per_step=passes,
            process_set=process_set,
        )
        assert isinstance(optimizer, type(everyone.optimizers[0]))
        data = list(batches(6 * passes, 2, size))
        for first in range(0, len(data), passes):
            optimizer.zero_grad()
            for one in everyone.optimizers:
                one.zero_grad()
            for x, y in data[first : first + passes]:
                for r, other in enumerate(everyone.nets):
                    loss_of(other, own(x, r, size), own(y, r, size)).backward()
                loss_of(net, own(x, rank, size), own(y, rank, size)).backward()
            # What is clipped is this rank's own.
            wanted = nn.utils.clip_grad_norm_(everyone.nets[rank].parameters(), 1.0)
            for r in set(range(size)) - {rank}:
                nn.utils.clip_grad_norm_(everyone.nets[r].parameters(), 1.0)
            optimizer.synchronize()
            norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            torch.testing.assert_close(norm, wanted, rtol=1e-9, atol=1e-12)
            with optimizer.skip_synchronize():
                optimizer.step()
            everyone.step()
            # Adam makes much of the last digits of what is almost zero.
            assert_same_parameters(net, everyone.nets[0], rtol=1e-6, atol=1e-9)
    finally:
        if members:
            hvd.remove_process_set(process_set)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.hosts("2,1")
@pytest.mark.wide_in(4)
@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("passes", [1, 2])
def test_the_parameters_follow_the_formula_over_the_ranks_own_steps(world, make, passes):
    world.run(by_the_formula, make, passes, None)


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("members", [(0, 2), (1, 2)])
def test_a_process_set_combines_the_steps_of_its_members(world, members):
    world.run(by_the_formula, "Adam", 1, members)


def some_parameters_only():
    """The first is changed by rank 0 alone, the second by all, the third by nobody."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    a, b, c = (nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(3))
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a, b, c, frozen], lr=1.0), op=hvd.Adasum)
    own_direction = torch.tensor([1.0, rank], dtype=torch.float64)
    for _ in range(2):
        optimizer.zero_grad()
        loss = (b * own_direction).sum()
        (loss + 3 * a.sum() if rank == 0 else loss).backward()
        optimizer.step()
    assert a.tolist() == [-6.0, -6.0]
    directions = [torch.tensor([1.0, r], dtype=torch.float64) for r in range(size)]
    torch.testing.assert_close(b.detach(), -2 * adasum(directions))
    assert c.tolist() == [0.0, 0.0]
    assert frozen.tolist() == [1.0, 1.0]


def test_a_rank_that_does_not_change_a_parameter_adds_nothing(world):
    world.run(some_parameters_only)


def closures():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    p = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=0.5), op=hvd.Adasum)
    target = torch.arange(3) + float(rank)
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
        alone = alone + adasum([torch.arange(3) + float(r) - alone for r in range(size)])
        torch.testing.assert_close(p.detach(), alone)


def test_a_closure_runs_within_the_ranks_own_step(world):
    world.run(closures)


def kinds(compression):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    params = {
        "float32": nn.Parameter(torch.ones(5)),
        "bfloat16": nn.Parameter(torch.ones(3, dtype=torch.bfloat16)),
        "complex": nn.Parameter(torch.ones(2, dtype=torch.complex64)),
        "transposed": nn.Parameter(torch.ones(3, 2).t()),
        "scalar": nn.Parameter(torch.tensor(1.0)),
        "empty": nn.Parameter(torch.ones(0, 2)),
    }
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(params.values(), lr=1.0),
        params.items(),
        compression=compression,
        op=hvd.Adasum,
    )
    weights = {name: torch.arange(p.numel()).reshape(p.shape) for name, p in params.items()}
    sum(
        (p * (weights[name] + rank).to(p.dtype)).sum().abs() for name, p in params.items()
    ).backward()
    optimizer.step()
    tolerance = 2e-2 if compression is hvd.Compression.bf16 else 1e-2
    for name, p in params.items():
        steps = [weights[name].double() + r for r in range(size)]
        moved = (1 - p.detach()).abs().double()
        torch.testing.assert_close(moved, adasum(steps), rtol=tolerance, atol=tolerance)
    table = nn.Embedding(4, 2, sparse=True)
    start = table.weight.detach().clone()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), op=hvd.Adasum)
    table(torch.tensor([rank])).sum().backward()
    optimizer.step()
    # Rows of different ranks are orthogonal: Adasum adds them.
    wanted = torch.zeros(4, 2)
    wanted[:size] = 1
    torch.testing.assert_close(start - table.weight.detach(), wanted)


@pytest.mark.parametrize("name", ["none", "fp16", "bf16"])
def test_parameters_of_any_kind_are_combined_compressed_or_not(world, name):
    world.run(kinds, getattr(hvd.Compression, name))


def scaled(how):
    """GradScaler divides this rank's gradients, and lets the ranks step that overflow."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    p = nn.Parameter(torch.zeros(3))
    if how == "fused":
        wrapped = torch.optim.SGD([p], lr=1.0, fused=True)
    else:
        wrapped = torch.optim.SGD([p], lr=1.0)
    optimizer = hvd.DistributedOptimizer(wrapped, op=hvd.Adasum)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    direction = torch.tensor([1.0, rank, 0.0])
    everyones = [torch.tensor([1.0, r, 0.0]) for r in range(size)]
    expected = torch.zeros(3)
    for overflowing in ((), (size - 1,), tuple(range(size)), ()):
        optimizer.zero_grad()
        factor = float("inf") if rank in overflowing else 1.0
        scaler.scale((p * direction).sum() * factor).backward()
        if how == "unscaled":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        steps = [-d * (r not in overflowing) for r, d in enumerate(everyones)]
        expected = expected + adasum(steps)
        torch.testing.assert_close(p.detach(), expected)
        assert_bitwise_equal_on_all_ranks(nn.ParameterList([p]))
    # Each rank's scale is its own.
    assert scaler.get_scale() == (256.0 if rank == size - 1 else 512.0)


@pytest.mark.parametrize("how", ["plain", "unscaled", "fused"])
def test_a_rank_whose_gradients_overflow_adds_nothing_to_the_step(world, how):
    world.run(scaled, how)


def differs():
    hvd.init()
    p, q = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3 + hvd.rank()))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([p, q], lr=1.0), [("p", p), ("q", q)], op=hvd.Adasum
    )
    texts = []
    for _ in range(2):
        (p.sum() + q.sum()).backward()
        with pytest.raises(hvd.HorovodInternalError) as caught:
            optimizer.step()
        texts.append(str(caught.value))
        assert not p.any(), "the parameters are as before"
    assert "parameter 1 differs: 'q' float32[3] on rank 0, 'q' float32[4] on rank 1" in texts[0]
    assert hvd.allreduce(torch.ones(1)).item() == 1
    return texts


def test_models_that_differ_are_an_error_that_changes_nothing(world):
    everyones = world.run(differs)
    assert len({text for texts in everyones for text in texts}) == 1


def lives_on():
    """Another world, more parameters, and an optimizer of gradients before it."""
    hvd.init()
    p = nn.Parameter(torch.zeros(1))
    former = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), op=hvd.Adasum)
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
    q = nn.Parameter(torch.zeros(1))
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


def test_it_outlives_shutdown_and_init_and_takes_new_parameters(world):
    world.run(lives_on)
