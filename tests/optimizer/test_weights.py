"""Ranks with different numbers of samples: `set_weight` makes the mean over the samples of all."""

import contextlib
import functools
import math

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

import hvdlite as hvd
from hvdlite.optimizer.buckets import weight_codes
from tests.harness.on_ranks import on_ranks
from tests.optimizer.models import (
    FEATURES,
    OPTIMIZERS,
    SGD,
    SMALL_BUCKETS,
    Twins,
    assert_bitwise_equal_on_all_ranks,
    assert_same_gradients,
    assert_same_parameters,
    loss_of,
    model,
    sgd,
)

pytestmark = pytest.mark.ranks(2)

# By step, the number of samples of each of up to three ranks.
COUNTS = [(4, 4, 4), (5, 2, 3), (0, 7, 1), (1, 1, 0), (6, 3, 5), (2, 3, 1)]


def parts_of(counts, seed):
    """Rows and targets, as many as each count."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(counts), FEATURES, dtype=torch.float64, generator=generator)
    return list(zip(x.split(counts), x.sin().sum(1, keepdim=True).split(counts), strict=True))


def samples(steps):
    """For each step by rank its rows and targets, and those of all."""
    for step in range(steps):
        parts = parts_of(COUNTS[step % len(COUNTS)][: hvd.size()], step)
        yield parts, [torch.cat(each) for each in zip(*parts, strict=True)]


@pytest.mark.parametrize(
    ("make", "options", "clips"),
    [
        ("momentum", {}, False),
        ("Adam", {"gradient_predivide_factor": 4.0}, True),
        ("Adam", {"shard": True}, True),
        ("momentum", {"num_groups": 2, "free_gradients": True}, False),
    ],
)
@on_ranks(2, 3, hosts=("1,2",), knobs=SMALL_BUCKETS)
def test_ranks_with_unequal_batches_train_as_one_process_on_the_joined_batch(make, options, clips):
    twins = Twins(OPTIMIZERS[make], **options)
    for parts, joined in samples(14):
        own = parts[hvd.rank()]
        twins.optimizer.set_weight(len(own[0]))
        twins.zero_grad()
        loss_of(twins.alone, *joined).backward()
        # A mean over no samples is NaN.
        loss_of(twins.net, *own).backward()
        if clips:
            wanted = nn.utils.clip_grad_norm_(twins.alone.parameters(), 0.1)
            norm = twins.optimizer.clip_grad_norm_(0.1)
            torch.testing.assert_close(norm, wanted, rtol=1e-9, atol=1e-12)
        if not options.get("shard"):
            assert_same_gradients(twins.net, twins.alone)
        twins.step(rtol=1e-7, atol=1e-9)
    assert_bitwise_equal_on_all_ranks(twins.net)


LARGE = [(1048577, 3, 77), (5, 1048577, 3), (7, 1048577, 0), (0, 1048577, 1), (1048577, 0, 5)]


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float64, {"gradient_predivide_factor": 2.0}),
        (torch.bfloat16, {"num_groups": 2}),
        (torch.float16, {}),
        (torch.complex64, {}),
        (torch.float32, {"compression": hvd.Compression.fp16}),
    ],
)
@on_ranks(2, 3, hosts=("1,1",), knobs=SMALL_BUCKETS)
def test_weights_are_added_exactly_whatever_the_gradients_travel_as(dtype, options):
    """A constant gradient: whatever is lost of the weights shows in all of it."""
    rank = hvd.rank()
    params = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (3, 17)]
    optimizer = sgd(params, **options)
    narrow = dtype is torch.float16 or "compression" in options
    # The products and their sum are rounded to what travels.
    rtol = 2e-2 if dtype is torch.bfloat16 else 2e-3 if narrow else 1e-6
    for step, weights in enumerate(LARGE):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        weight = weights[rank] / (1048577 if narrow else 1)
        optimizer.set_weight(weight if weights[0] else torch.tensor(weight))
        sum(p.real.sum() for p in params).mul(1.0 if weight else math.nan).backward()
        for p in params:
            torch.testing.assert_close(p.grad, torch.ones_like(p), rtol=rtol, atol=0.0)


WEIGHTS = st.one_of(
    st.none(), st.just(0.0), st.integers(1, 10**15).map(float), st.floats(1e-9, 1e15)
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@hypothesis.given(
    weights=st.lists(WEIGHTS, min_size=2, max_size=40),
    predivide=st.sampled_from([1.0, 3.0, 40.0, 1 / 7]),
)
def test_the_sum_of_the_weights_of_many_ranks_is_exact(dtype, weights, predivide):
    """As the engine reduces: 16-bit numbers are added in float32 and rounded on each host and at
    the end."""
    members = len(weights)
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    hosts = []
    for host in range(2):
        total = torch.zeros(weight_codes.elems(dtype, members), dtype=wide)
        for member in range(host, members, 2):
            place = torch.full((len(total),), 7, dtype=dtype)
            weight_codes.put(place, member, members, weights[member])
            total += place.to(wide) * (1 / predivide)
        hosts.append(total.to(dtype).to(wide))
    reduced = (sum(hosts) * (predivide / members)).to(dtype)
    wanted = math.fsum(weight or 0.0 for weight in weights)
    assert weight_codes.total(reduced, members) == wanted


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (SGD, {"sparse_as_dense": False}),
        (SGD, {"sparse_as_dense": True}),
        (functools.partial(torch.optim.SparseAdam, lr=0.125), {}),
    ],
)
@on_ranks(2, 3)
def test_rows_are_weighted_too(kind, options):
    nets = [nn.Embedding(12, 3, sparse=True, dtype=torch.float64) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    twins = Twins(kind, nets, **options)
    generator = torch.Generator().manual_seed(6)
    for step in range(8):
        counts = COUNTS[step % len(COUNTS)][: hvd.size()]
        rows = torch.randint(12, (sum(counts),), generator=generator)
        own = rows.split(counts)[hvd.rank()]
        twins.zero_grad()
        twins.optimizer.set_weight(len(own))
        for (net, _), words in zip(twins.both, (rows, own), strict=True):
            net(words).square().mean().backward()
        assert twins.net.weight.grad.is_sparse
        twins.step()


@on_ranks(2, 3)
def test_equal_weights_give_the_bits_of_the_average():
    grads = []
    for weight in (None, 1, 7):
        net = model(torch.float32)
        optimizer = sgd(net.parameters())
        if weight is not None:
            optimizer.set_weight(weight)
        x = torch.full((1, FEATURES), hvd.rank() + 0.3)
        net(x).sum().backward()
        grads.append([p.grad for p in net.parameters()])
    assert all(map(torch.equal, grads[0], grads[1]))
    # Equal weights are no weights, where the engine sees them.
    assert all(map(torch.equal, grads[0], grads[2]))


@on_ranks()
def test_an_infinite_gradient_stays_infinite():
    """An overflow on one rank skips the step on all of them."""
    p = nn.Parameter(torch.zeros(2))
    optimizer = sgd([p])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for overflows, wanted in ((False, -1.0), (True, -1.0), (False, -2.0)):
        optimizer.set_weight(1 + 2 * hvd.rank())
        loss = (p * (math.inf if overflows and hvd.rank() == 1 else 1.0)).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert p.tolist() == [wanted] * 2
        p.grad = None


@pytest.mark.parametrize("how", ["passes", "no_sync", "one pass"])
@pytest.mark.parametrize("members", [None, [0]])
@on_ranks(1, 2, 3)
def test_the_samples_of_all_passes_of_a_step_count_alike(how, members):
    """A second model is reached by some passes only. Where rank 0 is the only member of the process
    set, each rank trains by itself."""
    members = members if hvd.size() > 1 else None
    process_set = hvd.add_process_set(members) if members else hvd.global_process_set
    rank, size = (0, 1) if members else (hvd.rank(), hvd.size())
    passes = 1 if how == "one pass" else 3
    twins = Twins(
        OPTIMIZERS["Adam"],
        [nn.ModuleList([model(), model()]) for _ in range(2)],
        process_set=process_set,
        backward_passes_per_step=3 if how == "passes" else 1,
    )

    def loss(net, number, *batch):
        return loss_of(net[0], *batch) + (loss_of(net[1], *batch) if number else 0.0)

    for step in range(5):
        # By pass and rank: some passes, and in the third step a rank, have no samples.
        counts = [COUNTS[(step + number) % 6][:size] for number in range(passes)]
        parts = [
            parts_of(each, 10 * step + 7 * i + hvd.rank() * (size == 1))
            for i, each in enumerate(counts)
        ]
        total = sum(map(sum, counts))
        twins.zero_grad()
        for number, of_ranks in enumerate(parts):
            for part in of_ranks:
                if len(part[0]):
                    (loss(twins.alone, number, *part) * len(part[0]) / total).backward()
        for number, of_ranks in enumerate(parts):
            is_last = how != "no_sync" or number == passes - 1
            with contextlib.nullcontext() if is_last else twins.optimizer.no_sync():
                twins.optimizer.set_weight(len(of_ranks[rank][0]))
                own = loss(twins.net, number, *of_ranks[rank])
                # A pass without samples gives NaN.
                missing = sum((p * math.nan).sum() for p in twins.net.parameters())
                (own if len(of_ranks[rank][0]) else missing).backward()
        for p, q in zip(twins.net.parameters(), twins.alone.parameters(), strict=True):
            grads = [torch.zeros_like(p) if each.grad is None else each.grad for each in (p, q)]
            torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-12)
        if total:
            twins.step(rtol=1e-7, atol=1e-9)


@on_ranks()
def test_of_several_optimizers_one_weighs_a_gradient():
    """Over the same parameter: on each rank one reduces its gradients, and the other does not."""
    p = nn.Parameter(torch.zeros(2))
    sets = [hvd.add_process_set([member]) for member in range(2)]
    optimizers = [sgd([p], backward_passes_per_step=2, process_set=each) for each in sets]
    for weight, gradient in ((3, 1.0), (1, 5.0)):
        for optimizer in optimizers:
            optimizer.set_weight(weight)
        (p.sum() * gradient).backward()
    assert p.grad.tolist() == [2.0] * 2


@pytest.mark.parametrize("kept", [1.0, 0.5, None])
@on_ranks()
def test_what_a_script_makes_of_a_gradient_between_passes_is_not_weighed_again(kept):
    """Rank r's gradients are 2r + 1 and then 2. Between them it puts something into .grad."""
    own, at_once = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    optimizer = sgd([own, at_once], backward_passes_per_step=2)
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.set_weight(3)
        own.sum().mul(2 * hvd.rank() + 1).backward()
        own.grad = None if kept is None else own.grad * kept
        optimizer.set_weight(5)
        (own.sum() * 2 + at_once.sum()).backward()
    assert own.grad.tolist() == [(3 * (1 + 3) * (kept or 0.0) + 5 * 2 + 5 * 2) / 16] * 3
    assert at_once.grad.tolist() == [10 / 16] * 3


@on_ranks(2, 3)
def test_a_closure_has_its_weight_at_each_call_and_its_loss_has_it_too():
    options = {"lr": 0.1, "max_iter": 4, "line_search_fn": "strong_wolfe"}
    twins = Twins(functools.partial(torch.optim.LBFGS, **options))

    def closure(net, optimizer, x, y):
        optimizer.zero_grad()
        loss = loss_of(net, x, y)
        loss.backward()
        return loss

    for parts, joined in samples(4):
        own = parts[hvd.rank()]
        twins.optimizer.set_weight(len(own[0]))
        wanted, loss = (
            optimizer.step(functools.partial(closure, net, optimizer, *batch))
            for (net, optimizer), batch in zip(twins.both, (joined, own), strict=True)
        )
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-7, atol=1e-9)
        assert_same_parameters(twins.net, twins.alone, rtol=1e-6, atol=1e-8)


@on_ranks()
def test_parts_and_shared_parameters_have_the_weighted_mean_too():
    """Rank 0 has the gradient 1 and the weight 1, rank 1 has 2 and 3."""
    rank = hvd.rank()
    shared = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(shared.weight)
    hvd.share_parameters(shared)
    optimizer = sgd(shared.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.set_weight(1 + 2 * rank)
        (shared.weight.sum() * (1 + rank)).backward()
        optimizer.step()
    hvd.barrier()
    assert shared.weight.tolist() == [[-3 * 1.75] * 4]
    p, q = nn.Parameter(torch.zeros(5000)), nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    options = {"shard": "host", "free_gradients": True, "compression": hvd.Compression.bf16}
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam([p, q], lr=1.0), **options)
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.set_weight(1 + 2 * rank)
        (p.sum() * (1 + rank) + q.real.sum() * 4 * rank).backward()
        for param, mean in ((p, 1.75), (q, 3.0)):
            assert all((part.grad == mean).all() for part in optimizer.sharded_grad(param))
        optimizer.step()
