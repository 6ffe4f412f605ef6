"""Weighted steps of several backward passes, of closures and in other places."""

import contextlib

import pytest
import torch
from torch import nn

import hvdlite as hvd
from tests.optimizer.models import (
    FEATURES,
    assert_same_parameters,
    loss_of,
    model,
)
from tests.optimizer.test_weights import OPTIMIZERS, samples


def accumulates(how):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    alone, net = model(), model()
    reference = OPTIMIZERS["Adam"](alone.parameters())
    passes = 3
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["Adam"](net.parameters()),
        backward_passes_per_step=passes if how == "passes" else 1,
    )
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        # By pass and rank: some passes, and in the second step a rank, have no samples.
        counts = torch.randint(0, 4, (passes, size), generator=generator).tolist()
        counts[step % passes][step % size] += 1
        x = torch.randn(sum(map(sum, counts)), FEATURES, dtype=torch.float64, generator=generator)
        y = x.cos().sum(1, keepdim=True)
        reference.zero_grad()
        loss_of(alone, x, y).backward()
        reference.step()
        flat = [count for row in counts for count in row]
        parts = list(zip(x.split(flat), y.split(flat), strict=True))
        optimizer.zero_grad()
        for number in range(passes):
            own = parts[number * size + rank]
            if how == "no_sync" and number < passes - 1:
                if step % 2:
                    optimizer.set_weight(len(own[0]))
                with optimizer.no_sync():
                    if not step % 2:
                        optimizer.set_weight(len(own[0]))
                    loss_of(net, *own).backward()
            else:
                optimizer.set_weight(len(own[0]))
                loss_of(net, *own).backward()
        optimizer.step()
        assert_same_parameters(net, alone, rtol=1e-7, atol=1e-9)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("how", ["passes", "no_sync"])
def test_the_samples_of_all_passes_of_a_step_count_alike(world, how):
    world.run(accumulates, how)


def trains_outside(how):
    """Rank 0 is the only member; each rank has batches of its own, and a second layer that only
    some passes reach."""
    hvd.init()
    rank, passes = hvd.rank(), 3
    member = hvd.add_process_set([0])
    nets = [nn.ModuleList([model(), model()]) for _ in range(2)]
    alone, net = nets
    reference = OPTIMIZERS["Adam"](alone.parameters())
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS["Adam"](net.parameters()),
        backward_passes_per_step=passes if how == "passes" else 1,
        process_set=member,
    )

    def loss(net, number, *samples):
        return loss_of(net[0], *samples) + (loss_of(net[1], *samples) if number else 0.0)

    for step in range(4):
        generator = torch.Generator().manual_seed(10 * rank + step)
        # A pass without samples gives NaN; in the second step it is the first one.
        count = [(3, 1, 2), (0, 2, 5), (2, 0, 1), (4, 4, 0)][step]
        count = count[2:] if how == "one pass" else count
        parts = []
        for rows in count:
            x = torch.randn(rows, FEATURES, dtype=torch.float64, generator=generator)
            parts.append((x, x.cos().sum(1, keepdim=True)))
        reference.zero_grad()
        for number, part in enumerate(parts):
            if len(part[0]):
                (loss(alone, number, *part) * len(part[0]) / sum(count)).backward()
        optimizer.zero_grad()
        for number, part in enumerate(parts):
            optimizer.set_weight(len(part[0]))
            last = how != "no_sync" or number == passes - 1
            with contextlib.nullcontext() if last else optimizer.no_sync():
                loss(net, number, *part).backward()
        for p, q in zip(net.parameters(), alone.parameters(), strict=True):
            zeros = torch.zeros_like(p)
            torch.testing.assert_close(
                *(zeros if each.grad is None else each.grad for each in (p, q)),
                rtol=1e-9,
                atol=1e-12,
            )
        if sum(count):
            reference.step()
            optimizer.step()
    assert_same_parameters(net, alone, rtol=1e-7, atol=1e-9)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["passes", "no_sync", "one pass"])
def test_a_rank_outside_the_process_set_weighs_its_passes_as_one_process_does(world, how):
    world.run(trains_outside, how)


def one_optimizer_for_each_set():
    """Over the same parameter: on each rank one reduces its gradients, and the other does not."""
    hvd.init()
    p = nn.Parameter(torch.zeros(2))
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD([p], lr=1.0),
            backward_passes_per_step=2,
            process_set=hvd.add_process_set([member]),
        )
        for member in range(2)
    ]
    for weight, gradient in ((3, 1.0), (1, 5.0)):
        for optimizer in optimizers:
            optimizer.set_weight(weight)
        (p.sum() * gradient).backward()
    return p.grad.tolist()


@pytest.mark.ranks(2)
def test_of_several_optimizers_one_weighs_a_gradient(world):
    assert world.run(one_optimizer_for_each_set) == [[2.0] * 2] * 2


def half(grad):
    return grad / 2


def nothing(grad):
    return None


def replaces(between):
    """Rank r's gradients are 2r + 1 and then 2. Between them it puts something into .grad."""
    hvd.init()
    rank = hvd.rank()
    own, at_once = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([own, at_once], lr=1.0), backward_passes_per_step=2
    )
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.set_weight(3)
        own.sum().mul(2 * rank + 1).backward()
        own.grad = between(own.grad)
        optimizer.set_weight(5)
        (own.sum() * 2 + at_once.sum()).backward()
    return own.grad.tolist(), at_once.grad.tolist()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("between", "mean"),
    [
        (torch.clone, (3 * 1 + 3 * 3 + 5 * 2 + 5 * 2) / 16),
        (half, (1.5 * 1 + 1.5 * 3 + 5 * 2 + 5 * 2) / 16),
        (nothing, (5 * 2 + 5 * 2) / 16),
    ],
)
def test_what_a_script_makes_of_a_gradient_between_passes_is_not_weighed_again(
    world, between, mean
):
    assert world.run(replaces, between) == [([mean] * 3, [10 / 16] * 3)] * 2


def closures():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    alone, net = model(), model()
    options = {"lr": 0.1, "max_iter": 4, "line_search_fn": "strong_wolfe"}
    reference = torch.optim.LBFGS(alone.parameters(), **options)
    optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS(net.parameters(), **options))
    for parts, x, y in samples(4, size):

        def closure(net, optimizer, x, y):
            optimizer.zero_grad()
            loss = loss_of(net, x, y)
            loss.backward()
            return loss

        wanted = reference.step(lambda x=x, y=y: closure(alone, reference, x, y))
        optimizer.set_weight(len(parts[rank][0]))
        loss = optimizer.step(lambda own=parts[rank]: closure(net, optimizer, *own))
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-7, atol=1e-9)
        assert_same_parameters(net, alone, rtol=1e-6, atol=1e-8)


@pytest.mark.ranks(2, 3)
def test_a_closure_has_its_weight_at_each_call_and_its_loss_has_it_too(world):
    world.run(closures)


def in_other_places():
    """Rank 0 has the gradient 1 and the weight 1, rank 1 has 2 and 3."""
    hvd.init()
    rank = hvd.rank()

    def step(optimizer, loss):
        optimizer.zero_grad()
        optimizer.set_weight(1 + 2 * rank)
        loss().backward()

    shared = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(shared.weight)
    hvd.share_parameters(shared)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(shared.parameters(), lr=1.0))
    for _ in range(3):
        step(optimizer, lambda: shared.weight.sum() * (1 + rank))
        optimizer.step()
    hvd.barrier()
    assert shared.weight.tolist() == [[-3 * 1.75] * 4]
    p, q = nn.Parameter(torch.zeros(5000)), nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam([p, q], lr=1.0),
        shard="host",
        free_gradients=True,
        compression=hvd.Compression.bf16,
    )
    for _ in range(3):
        step(optimizer, lambda: p.sum() * (1 + rank) + q.real.sum() * 4 * rank)
        for param, mean in ((p, 1.75), (q, 3.0)):
            for part in optimizer.sharded_grad(param):
                assert (part.grad == mean).all()
        optimizer.step()
    # On rank 0, which is no member, it is the wrapped optimizer.
    alone = hvd.add_process_set([1])
    p = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), process_set=alone)
    step(optimizer, p.sum)
    assert p.grad.tolist() == [1.0, 1.0]


@pytest.mark.ranks(2)
def test_parts_shared_parameters_and_process_sets_have_the_weighted_mean_too(world):
    world.run(in_other_places)
