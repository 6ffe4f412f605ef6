"""Ranks with different numbers of samples: `set_weight` makes the mean over the samples of all."""

import math

import pytest
import torch
from torch import nn

import hvdlite as hvd
from tests.optimizer.models import (
    FEATURES,
    assert_bitwise_equal_on_all_ranks,
    assert_same_parameters,
    loss_of,
    model,
)

SMALL_BUCKETS = {"HVDLITE_BUCKET_BYTES": "1500", "HVDLITE_FIRST_BUCKET_BYTES": "100"}

OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
}

# By step, the number of samples of each of up to three ranks.
COUNTS = [(4, 4, 4), (5, 2, 3), (0, 7, 1), (1, 1, 0), (6, 3, 5), (2, 3, 1)]


def samples(steps, size, dtype=torch.float64):
    """For each step by rank its rows and targets."""
    generator = torch.Generator().manual_seed(3)
    for step in range(steps):
        counts = COUNTS[step % len(COUNTS)][:size]
        x = torch.randn(sum(counts), FEATURES, dtype=torch.float64, generator=generator).to(dtype)
        y = x.sin().sum(1, keepdim=True)
        yield list(zip(x.split(counts), y.split(counts), strict=True)), x, y


def trains_as_one_process(make, options, clips):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    alone, net = model(), model()
    reference = OPTIMIZERS[make](alone.parameters())
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS[make](net.parameters()), net.named_parameters(), **options
    )
    for parts, x, y in samples(14, size):
        reference.zero_grad()
        loss_of(alone, x, y).backward()
        optimizer.set_weight(len(parts[rank][0]))
        optimizer.zero_grad()
        # A mean over no samples is NaN.
        loss_of(net, *parts[rank]).backward()
        if clips:
            wanted = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
            norm = optimizer.clip_grad_norm_(0.1)
            torch.testing.assert_close(norm, wanted, rtol=1e-9, atol=1e-12)
        if not options.get("shard"):
            for p, q in zip(net.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-12)
        reference.step()
        optimizer.step()
    assert_same_parameters(net, alone, rtol=1e-7, atol=1e-9)
    assert_bitwise_equal_on_all_ranks(net)


@pytest.mark.ranks(2, 3)
@pytest.mark.hosts("1,2")
@pytest.mark.parametrize(
    ("make", "options", "clips"),
    [
        ("momentum", {}, False),
        ("Adam", {"gradient_predivide_factor": 4.0}, True),
        ("Adam", {"shard": True}, True),
        ("momentum", {"num_groups": 2, "free_gradients": True}, False),
    ],
)
def test_ranks_with_unequal_batches_train_as_one_process_on_the_joined_batch(
    world, make, options, clips
):
    world.run(trains_as_one_process, make, options, clips, knobs=SMALL_BUCKETS)


def fractions(dtype, options):
    """Gradients, weights and sums that the dtype has exactly, so that any error shows."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    generator = torch.Generator().manual_seed(5)
    params = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (3, 17, 1)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), **options)
    for step in range(12):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        # The sum of all weights is a power of two; some ranks have 0.
        weights = [0.0] * size
        for _ in range(8):
            weights[int(torch.randint(size, (), generator=generator))] += 0.125
        grads = [
            [torch.randint(-8, 8, p.shape, generator=generator) for p in params] for _ in weights
        ]
        optimizer.set_weight(weights[rank] if step % 3 else torch.tensor(weights[rank]))
        if weights[rank]:
            loss = sum((p * g.to(dtype)).sum() for p, g in zip(params, grads[rank], strict=True))
        else:
            loss = sum((p * math.nan).sum() for p in params)
        loss.backward()
        for index, p in enumerate(params):
            wanted = sum(w * g[index].double() for w, g in zip(weights, grads, strict=True))
            assert p.grad.double().tolist() == wanted.tolist(), (step, weights)


@pytest.mark.ranks(2, 4)
@pytest.mark.hosts("2,2")
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float64, {"gradient_predivide_factor": 2.0}),
        (torch.bfloat16, {"num_groups": 2}),
        (torch.float32, {"compression": hvd.Compression.fp16}),
    ],
)
def test_the_mean_is_exact_where_the_numbers_are(world, dtype, options):
    world.run(fractions, dtype, options, knobs=SMALL_BUCKETS)


def large_and_uneven(dtype, options):
    """A constant gradient: whatever is lost of the weights shows in all of it."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    p = nn.Parameter(torch.zeros(5, dtype=dtype))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), **options)
    weights = [1048577, 3, 77][:size]
    scale = 1048577 if dtype is torch.float16 or options else 1
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.set_weight(weights[rank] / scale)
        p.real.sum().backward()
        # The products and their sum are rounded to what travels.
        rtol = 2e-2 if dtype is torch.bfloat16 else 2e-3 if scale > 1 else 1e-6
        torch.testing.assert_close(p.grad, torch.ones_like(p), rtol=rtol, atol=0.0)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {}),
        (torch.float16, {}),
        (torch.complex64, {}),
        (torch.float32, {"compression": hvd.Compression.fp16}),
    ],
)
def test_weights_are_added_exactly_whatever_the_gradients_travel_as(world, dtype, options):
    world.run(large_and_uneven, dtype, options)


def sparse(options):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    alone, net = (nn.Embedding(12, 3, sparse=True, dtype=torch.float64) for _ in range(2))
    for table in (alone, net):
        nn.init.ones_(table.weight)
    extra = {} if "kind" in options else {"sparse_as_dense": options["sparse_as_dense"]}
    kind = options.get("kind", torch.optim.SGD)
    reference = kind(alone.parameters(), lr=0.125)
    optimizer = hvd.DistributedOptimizer(kind(net.parameters(), lr=0.125), **extra)
    generator = torch.Generator().manual_seed(6)
    for step in range(8):
        counts = COUNTS[step % len(COUNTS)][:size]
        rows = torch.randint(12, (sum(counts),), generator=generator)
        reference.zero_grad()
        alone(rows).square().mean().backward()
        reference.step()
        own = rows.split(counts)[rank]
        optimizer.zero_grad()
        optimizer.set_weight(len(own))
        net(own).square().mean().backward()
        assert net.weight.grad.is_sparse
        optimizer.step()
    assert_same_parameters(net, alone)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    "options",
    [{"sparse_as_dense": False}, {"sparse_as_dense": True}, {"kind": torch.optim.SparseAdam}],
)
def test_rows_are_weighted_too(world, options):
    world.run(sparse, options)


def counted():
    """What the engine counts in steps without and with weights, after the first two."""
    hvd.init()
    params = [nn.Parameter(torch.ones(1 + 37 * i)) for i in range(20)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=0.0))
    engine = hvd.world.world.current().team.engine
    counts = []
    for step in range(8):
        before = engine.counters()
        if step % 2:
            optimizer.set_weight(2 + hvd.rank())
        sum(p.sum() for p in params).backward()
        optimizer.step()
        optimizer.zero_grad()
        after = engine.counters()
        counts.append({name: after[name] - before[name] for name in after})
    return counts[2:]


@pytest.mark.ranks(2)
@pytest.mark.hosts("1,1")
def test_weights_cost_no_operation_and_no_message(world):
    for counts in world.run(counted, knobs=SMALL_BUCKETS):
        for name in ("operations", "control_messages"):
            assert len({count[name] for count in counts}) == 1, (name, counts)
        assert counts[0]["operations"] > 1


def same_bits_as_the_average():
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    nets = [model(torch.float32) for _ in range(3)]
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.01)) for net in nets
    ]
    for parts, _, _ in samples(1, size, torch.float32):
        for net, optimizer, weight in zip(nets, optimizers, (None, 1, 7), strict=True):
            if weight is not None:
                optimizer.set_weight(weight)
            loss_of(net, *parts[rank]).backward()
    plain, ones, sevens = ([p.grad for p in net.parameters()] for net in nets)
    assert all(map(torch.equal, plain, ones))
    torch.testing.assert_close(plain, sevens)
    # Equal weights are no weights, where the engine sees them.
    assert all(map(torch.equal, plain, sevens))


@pytest.mark.ranks(2, 3)
def test_equal_weights_give_the_average_and_weights_of_1_its_bits(world):
    world.run(same_bits_as_the_average)


def in_any_layout():
    """The numbers of a large bucket, in which each addition is rounded."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    generator = torch.Generator().manual_seed(7)
    grads = torch.randn(size, 50_000, generator=generator)
    weights = [3.0, 0.7, 11.0][:size]
    p = nn.Parameter(torch.zeros(50_000))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))
    optimizer.set_weight(weights[rank])
    (p * grads[rank]).sum().backward()
    total = grads[0] * weights[0]
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        total = total + grad * weight
    return torch.equal(p.grad, total * (1 / size) * (size / math.fsum(weights)))


@pytest.mark.ranks(2, 3)
@pytest.mark.hosts("2,1", "1,1,1")
def test_in_deterministic_mode_the_bits_do_not_depend_on_the_hosts(world):
    assert all(world.run(in_any_layout, knobs={"HVDLITE_DETERMINISTIC": "1"}))


def scaled():
    """An overflow on one rank skips the step on all of them."""
    hvd.init()
    rank = hvd.rank()
    p = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for step, overflows in enumerate((False, True, False)):
        optimizer.set_weight(1 + 2 * rank)
        loss = (p * (math.inf if overflows and rank == 1 else 1.0)).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert p.tolist() == [[-1.0] * 2, [-1.0] * 2, [-2.0] * 2][step]
        if step != 1:
            optimizer.zero_grad()
        else:
            p.grad = None


@pytest.mark.ranks(2)
def test_an_infinite_gradient_stays_infinite(world):
    world.run(scaled)
