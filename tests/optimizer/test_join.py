"""Ranks with different numbers of batches: a rank that has none left joins."""

import pytest
import torch
from torch import nn

import hvdlite as hvd
from tests.optimizer.models import assert_same_parameters, batches, loss_of, model, own

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.mpis("mpich")]

BATCHES = 4


def num_batches(rank, size, last):
    """Rank `last` has the most, the one after it none at all."""
    return BATCHES * ((rank - last - 1) % size) // (size - 1)


def uneven(last, options):
    """The gradients are those of the ranks that have data, divided by the number of all."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    alone, net = model(), model()
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), **options)
    factor = size if options.get("op") is hvd.Sum else 1
    for _ in range(2):
        for step, (x, y) in enumerate(batches(BATCHES, 2, size)):
            having = [r for r in range(size) if step < num_batches(r, size, last)]
            reference.zero_grad()
            for r in having:
                (loss_of(alone, own(x, r, size), own(y, r, size)) * factor / size).backward()
            reference.step()
            if rank in having:
                optimizer.zero_grad()
                loss_of(net, own(x, rank, size), own(y, rank, size)).backward()
                optimizer.step()
                assert_same_parameters(net, alone)
        assert hvd.join() == last
        # Ranks that joined before have missed steps.
        hvd.broadcast_parameters(net.state_dict(), root_rank=last)
        assert_same_parameters(net, alone)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.hosts("1,1", "2,1")
@pytest.mark.wide_in(4, "1,1")
@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("options", [{}, {"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}])
def test_a_rank_that_has_joined_counts_with_zeros(world, last, options):
    world.run(uneven, last, options)


def learns_together():
    """While rank 1 has joined, rank 0 has a dense gradient, and later rank 1 a sparse one."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(3, 2))
    # Rank 0 makes a step before the others' first one.
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([a, b], lr=1.0), op=hvd.Sum, check_start=False
    )
    if rank == 0:
        a.sum().backward()
        assert b.grad is None
        b.sum().backward()
        assert a.grad.tolist() == [1.0]
        assert b.grad.tolist() == [[1.0] * 2] * 3
        optimizer.step()
    hvd.join()
    for step in range(2):
        optimizer.zero_grad()
        if rank == 1:
            nn.functional.embedding(torch.tensor([step]), b, sparse=True).sum().backward()
        else:
            a.sum().backward()
        optimizer.step()
        assert a.grad.tolist() == [size - 1.0]
        assert b.grad.is_sparse
        wanted = torch.zeros(3, 2)
        wanted[step] = 1
        assert torch.equal(b.grad.to_dense(), wanted)


def test_what_is_found_out_while_a_rank_has_joined_does_not_separate_the_ranks(world):
    world.run(learns_together)


def adasum():
    hvd.init()
    rank = hvd.rank()
    p = nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), op=hvd.Adasum)
    if rank == 0:
        p.sum().backward()
        optimizer.step()
        assert p.tolist() == [-1.0, -1.0]
    hvd.join()
    hvd.broadcast_parameters([p], root_rank=0)
    p.grad = torch.tensor([1.0, 0.0])
    optimizer.step()
    assert p.tolist() == [-2.0, -1.0]


def test_adasum_adds_nothing_of_a_rank_that_has_joined(world):
    world.run(adasum)


def thaws_while_others_have_joined():
    hvd.init()
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1), requires_grad=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([a, b], lr=1.0))
    if hvd.rank() == 0:
        b.requires_grad_(True)
        for _ in range(2):
            with pytest.raises(hvd.HorovodInternalError, match="has joined"):
                (a + b).sum().backward()
            optimizer.zero_grad()
    hvd.join()
    assert hvd.allreduce(torch.ones(1)).item() == 1


@pytest.mark.hosts("1,1")
def test_new_buckets_are_an_error_while_a_rank_has_joined(world):
    world.run(thaws_while_others_have_joined)
