"""Ranks with different numbers of samples: `set_weight` makes the mean over the samples of all."""

import contextlib
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


def small_weights(passes):
    """The least that float16 takes, of gradients that it has in full; and less."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    generator = torch.Generator().manual_seed(8)
    grads = torch.rand(size, passes, 999, generator=generator) + 0.5
    weights = torch.rand(size, passes, 1, generator=generator) * 0.001 + 0.001
    texts = []
    for dtype, options in (
        (torch.float16, {}),
        (torch.float32, {"compression": hvd.Compression.fp16}),
    ):
        p = nn.Parameter(torch.zeros(999, dtype=dtype))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([p], lr=1.0), backward_passes_per_step=passes, **options
        )

        def backward(scale, p=p, optimizer=optimizer, dtype=dtype):
            optimizer.zero_grad()
            for grad, weight in zip(grads[rank].to(dtype), weights[rank], strict=True):
                optimizer.set_weight(weight * scale)
                (p * grad).sum().backward()

        backward(1)
        mean = (grads * weights).sum((0, 1)) / weights.sum()
        torch.testing.assert_close(p.grad.float(), mean, rtol=4e-3, atol=0.0)
        with pytest.raises(hvd.HorovodInternalError) as caught:
            backward(0.2 / passes)
        assert not p.any()
        texts.append(str(caught.value).partition(":")[2])
        backward(1)
        torch.testing.assert_close(p.grad.float(), mean, rtol=4e-3, atol=0.0)
    return texts


@pytest.mark.ranks(2)
@pytest.mark.hosts("1,1")
@pytest.mark.parametrize("passes", [1, 2])
def test_weights_that_are_too_small_for_float16_are_an_error_on_all_ranks(world, passes):
    found = world.run(small_weights, passes)
    assert len({text for texts in found for text in texts}) == 1
    assert "the largest weight of all ranks is 0.000" in found[0][0]
    assert "set_weight(len(batch) / batch_size), or use Compression.bf16" in found[0][0]


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


def joins(weighted):
    """Rank r has r + 1 batches: in the end fewer and fewer ranks take part."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    alone, net = model(), model()
    reference = OPTIMIZERS["momentum"](alone.parameters())
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["momentum"](net.parameters()))
    for epoch in range(2):
        for step in range(size):
            generator = torch.Generator().manual_seed(10 * epoch + step)
            parts = []
            for r in range(step, size):
                rows = 2 + (r + step) % 3
                x = torch.randn(rows, FEATURES, dtype=torch.float64, generator=generator)
                parts.append((x, x.sin().sum(1, keepdim=True)))
            reference.zero_grad()
            if weighted:
                x, y = (torch.cat(each) for each in zip(*parts, strict=True))
                loss_of(alone, x, y).backward()
            else:
                # As Horovod: the mean divides by the number of all ranks.
                (sum(loss_of(alone, *part) for part in parts) / size).backward()
            reference.step()
            if step <= rank:
                own = parts[rank - step]
                optimizer.zero_grad()
                if weighted:
                    optimizer.set_weight(len(own[0]))
                loss_of(net, *own).backward()
                optimizer.step()
                assert_same_parameters(net, alone)
        last = hvd.join()
        assert last == size - 1
        hvd.broadcast_parameters(net.state_dict(), root_rank=last)
        hvd.broadcast_optimizer_state(optimizer, root_rank=last)
        assert_same_parameters(net, alone)


@pytest.mark.ranks(2, 3)
@pytest.mark.hosts("1,1")
@pytest.mark.parametrize("weighted", [True, False])
def test_with_weights_a_rank_that_has_joined_does_not_count_in_the_mean(world, weighted):
    world.run(joins, weighted)


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


def one_forgets(kind, size_of_first):
    hvd.init()
    rank = hvd.rank()
    p = nn.Parameter(torch.zeros(4, 2))
    optimizer = hvd.DistributedOptimizer(kind([p], lr=1.0))
    sparse = kind is torch.optim.SparseAdam

    def backward(weight):
        optimizer.zero_grad()
        if weight is not None:
            optimizer.set_weight(weight)
        nn.functional.embedding(torch.arange(4), p, sparse=sparse).sum().backward()

    backward(1)
    optimizer.step()
    with pytest.raises(hvd.HorovodInternalError) as caught:
        backward(3 if rank == size_of_first else None)
    # All can go on.
    backward(2)
    assert (p.grad.to_dense() == 1).all()
    backward(None)
    assert (p.grad.to_dense() == 1).all()
    return str(caught.value)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.SparseAdam])
@pytest.mark.parametrize("who", [0, 1])
def test_if_only_some_ranks_give_a_weight_all_get_the_error(world, kind, who):
    others = ", ".join(str(rank) for rank in range(3) if rank != who)
    for text in world.run(one_forgets, kind, who):
        assert f"optimizer.set_weight(n) on rank {who}" in text
        assert f"no weight on ranks {others}" in text
        assert "Call optimizer.set_weight(n) on every rank before backward()" in text


def forgotten_after_the_step():
    hvd.init()
    rank = hvd.rank()
    p = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0))

    def grad():
        optimizer.zero_grad()
        (p * (1.0 + 2.0 * rank)).sum().backward()
        return p.grad.item()

    optimizer.set_weight(3 - 2 * rank)
    assert grad() == 1.5
    # `zero_grad` after a backward ends what the weight is for.
    assert grad() == 2.0
    optimizer.zero_grad()
    optimizer.set_weight(0)
    assert grad() == 0.0
    optimizer.step()
    assert grad() == 2.0
    # The gradient of `step` without a backward counts with the weight too.
    optimizer.zero_grad()
    optimizer.set_weight(3 - 2 * rank)
    p.grad = torch.tensor([1.0 + 2.0 * rank])
    optimizer.synchronize()
    assert p.grad.item() == 1.5


@pytest.mark.ranks(2)
def test_a_weight_counts_until_the_step(world):
    world.run(forgotten_after_the_step)


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


def bad_calls():
    hvd.init()
    p = nn.Parameter(torch.zeros(2))

    def distributed(**options):
        return hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), **options)

    optimizer = distributed()
    for bad in (-1, math.nan, math.inf, True, "3", None, torch.ones(2), torch.tensor(True), 1e-10):
        with pytest.raises(ValueError, match=r"^set_weight\(.*expected"):
            optimizer.set_weight(bad)
    with pytest.raises(ValueError, match="expected 0, or a number from 1e-09 to 1e"):
        optimizer.set_weight(10**400)
    p.sum().backward()
    with pytest.raises(RuntimeError, match=r"reduced already; call it before\s+backward"):
        optimizer.set_weight(1)
    optimizer.zero_grad()
    with optimizer.no_sync():
        p.sum().backward()
        with pytest.raises(RuntimeError, match="pass of this step that had no weight"):
            optimizer.set_weight(1)
        optimizer.zero_grad()
        optimizer.set_weight(1)
        p.sum().backward()
    with optimizer.skip_synchronize(), pytest.raises(RuntimeError, match="are not reduced"):
        optimizer.step()
    for op in (hvd.Sum, hvd.Adasum):
        with pytest.raises(ValueError, match="needs op=Average"):
            distributed(op=op).set_weight(1)
    half = distributed(compression=hvd.Compression.fp16)
    with pytest.raises(ValueError, match=r"travel as float16.*fractions of the largest batch"):
        half.set_weight(2)
    half.set_weight(0.5)


@pytest.mark.ranks(1)
def test_bad_and_late_calls_are_errors_that_say_what_to_do(world):
    world.run(bad_calls)
