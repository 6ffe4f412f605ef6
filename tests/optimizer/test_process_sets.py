"""Optimizers of some of the ranks."""

import pytest
import torch
from torch import nn

import hvdlite as hvd
from tests.optimizer.models import assert_same_parameters, batches, loss_of, model, own

pytestmark = [pytest.mark.ranks(3, 4), pytest.mark.mpis("mpich")]


def trains(members, options):
    """Members train together, on their own joined batch; each of the others by itself."""
    hvd.init()
    process_set = hvd.add_process_set(members)
    try:
        net, alone = model(), model()
        reference = torch.optim.Adam(alone.parameters(), lr=0.01)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(net.parameters(), lr=0.01),
            net.named_parameters(),
            process_set=process_set,
            **options,
        )
        rank, size = hvd.rank(), 1
        if process_set.included():
            rank, size = process_set.rank(), process_set.size()
        factor = size if options.get("op") is hvd.Sum else 1
        # A rank outside the set trains on rows of its own, and for longer.
        steps = 6 if process_set.included() else 7 + rank
        for x, y in batches(steps, 2, max(size, rank + 1)):
            if not process_set.included():
                x, y = own(x, rank, rank + 1), own(y, rank, rank + 1)
            reference.zero_grad()
            (loss_of(alone, x, y) * factor).backward()
            reference.step()
            optimizer.zero_grad()
            own_x, own_y = (own(x, rank, size), own(y, rank, size)) if size > 1 else (x, y)
            loss_of(net, own_x, own_y).backward()
            optimizer.step()
            assert_same_parameters(net, alone)
    finally:
        hvd.remove_process_set(process_set)


@pytest.mark.hosts("2,1", "1,2")
@pytest.mark.wide_in(4, "1,2")
@pytest.mark.parametrize("members", [(0, 2), (1,), (1, 2)])
@pytest.mark.parametrize("options", [{}, {"gradient_predivide_factor": 4.0}, {"op": hvd.Sum}])
def test_the_members_train_as_one_process_on_their_joined_batch(world, members, options):
    world.run(trains, members, options)


def one_for_each_set(op):
    """Over the same parameters, made on all ranks: the other set's is the newest here or there."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    sets = [hvd.add_process_set([0, 1]), hvd.add_process_set(range(2, size))]
    try:
        p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizers = [
            hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), process_set=s, op=op)
            for s in sets
        ]
        mine, other = optimizers if sets[0].included() else optimizers[::-1]
        assert type(mine).__mro__[1:] == type(other).__mro__[1:]
        (p * (rank + 1)).sum().backward()
        mine.step()
        members = sets[0].ranks if sets[0].included() else sets[1].ranks
        moved = sum(r + 1 for r in members) / len(members)
        # Of collinear changes Adasum makes their mean.
        assert p.item() == pytest.approx(-moved)
        # This rank alone, and unlike the others.
        for _ in range(rank):
            mine.zero_grad()
            with other.no_sync():
                p.grad = torch.full_like(p, 0.5)
            other.synchronize()
            with other.skip_synchronize():
                other.step()
            other.step(lambda: 2.0)
        other.set_backward_passes_per_step(3)
        assert other.backward_passes_per_step == 3
        other.add_param_group({"params": [nn.Parameter(torch.ones(rank + 1))]})
        other.load_state_dict(other.state_dict())
        other.zero_grad()
        assert p.grad is None
        assert p.item() == pytest.approx(-moved - rank)
    finally:
        for process_set in sets:
            hvd.remove_process_set(process_set)
    # It stays what it was, but none is made of a set that is gone.
    other.step()
    with pytest.raises(ValueError, match="is not registered"):
        hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), process_set=sets[0], op=op)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_the_optimizer_of_a_set_that_this_rank_is_no_member_of_communicates_nothing(world, op):
    world.run(one_for_each_set, op)


def overlap():
    """Rank 1 is in both sets, and trains two models at once; one backward reaches both."""
    hvd.init()
    rank = hvd.rank()
    sets = [hvd.add_process_set([0, 1]), hvd.add_process_set([1, 2])]
    try:
        params = [nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in sets]
        both = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        of_sets = [
            hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), process_set=s)
            for p, s in zip(params, sets, strict=True)
            if s.included()
        ]
        of_all = hvd.DistributedOptimizer(torch.optim.SGD([both], lr=1.0))
        for _ in range(3):
            mine = [p for p, s in zip(params, sets, strict=True) if s.included()]
            (sum(mine, both) * (rank + 1)).sum().backward()
            for optimizer in (*of_sets, of_all):
                optimizer.step()
                optimizer.zero_grad()
        means = [-3 * (0 + 1 + 2) / 2, -3 * (1 + 2 + 2) / 2]
        for p, s, mean in zip(params, sets, means, strict=True):
            assert p.item() == (mean if s.included() else 0)
        mean = sum(r + 1 for r in range(hvd.size())) / hvd.size()
        assert both.item() == pytest.approx(-3 * mean)
    finally:
        for process_set in sets:
            hvd.remove_process_set(process_set)


def test_two_optimizers_work_on_overlapping_sets_at_once(world):
    world.run(overlap)


def removed_and_added():
    hvd.init()
    process_set = hvd.add_process_set([0, 1])
    p = nn.Parameter(torch.zeros(1))
    if process_set.included():
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([p], lr=1.0), process_set=process_set, op=hvd.Sum
        )
    for _ in range(2):
        if process_set.included():
            optimizer.zero_grad()
            p.sum().backward()
            assert p.grad.item() == 2
            optimizer.step()
        hvd.remove_process_set(process_set)
        if hvd.rank() < 2:
            optimizer.zero_grad()
            with pytest.raises(ValueError, match="is not registered"):
                p.sum().backward()
            optimizer.zero_grad()
        # The same object, that the optimizer knows.
        hvd.add_process_set(process_set)
    hvd.remove_process_set(process_set)


def test_an_optimizer_goes_on_with_a_set_that_is_registered_again(world):
    world.run(removed_and_added)


def sparse_rows():
    hvd.init()
    process_set = hvd.add_process_set([0, 2])
    try:
        if process_set.included():
            torch.manual_seed(1)
            table = nn.Embedding(3, 2, sparse=True)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(table.parameters(), lr=1.0), process_set=process_set
            )
            for _ in range(2):
                optimizer.zero_grad()
                table(torch.tensor([hvd.rank()])).sum().backward()
                assert table.weight.grad.to_dense().tolist() == [[0.5] * 2, [0.0] * 2, [0.5] * 2]
    finally:
        hvd.remove_process_set(process_set)


def test_the_rows_of_sparse_gradients_are_those_of_the_members(world):
    world.run(sparse_rows)


def differs():
    hvd.init()
    process_set = hvd.add_process_set([1, 2])
    try:
        if not process_set.included():
            return None
        p = nn.Parameter(torch.zeros(hvd.rank()))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([p], lr=1.0), [("w", p)], process_set=process_set
        )
        with pytest.raises(hvd.HorovodInternalError) as caught:
            p.sum().backward()
        optimizer.zero_grad()
        return str(caught.value)
    finally:
        hvd.remove_process_set(process_set)


def test_errors_name_the_ranks_as_the_world_counts_them(world):
    texts = world.run(differs)[1:3]
    assert texts[0] == texts[1]
    assert "'w' float32[1] on rank 1, 'w' float32[2] on rank 2" in texts[0]
