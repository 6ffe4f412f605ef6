"""Optimizers of some of the ranks."""

import pytest
import torch
from torch import nn

import hvdlite as hvd
from tests.training.models import assert_same_parameters, batches, loss_of, model, own

pytestmark = [pytest.mark.ranks(3, 4), pytest.mark.mpis("mpich")]


def trains(members, options):
    """Members train together, on their own joined batch; the others have nothing to do with it."""
    hvd.init()
    process_set = hvd.add_process_set(members)
    try:
        net = model()
        wrapped = torch.optim.Adam(net.parameters(), lr=0.01)
        if not process_set.included():
            with pytest.raises(ValueError, match=rf"rank {hvd.rank()} is not a member of process_"):
                hvd.DistributedOptimizer(wrapped, process_set=process_set)
            return
        rank, size = process_set.rank(), process_set.size()
        alone = model()
        reference = torch.optim.Adam(alone.parameters(), lr=0.01)
        optimizer = hvd.DistributedOptimizer(
            wrapped, net.named_parameters(), process_set=process_set, **options
        )
        factor = size if options.get("op") is hvd.Sum else 1
        for x, y in batches(6, 2, size):
            reference.zero_grad()
            (loss_of(alone, x, y) * factor).backward()
            reference.step()
            optimizer.zero_grad()
            loss_of(net, own(x, rank, size), own(y, rank, size)).backward()
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
