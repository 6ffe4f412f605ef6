"""Ranks with different numbers of batches: a rank that has none left joins."""

import pytest
import torch
from torch import nn

import hvdlite as hvd
from tests.harness.on_ranks import on_ranks
from tests.optimizer.models import Twins, assert_same_parameters, batches, loss_of, mine, own, sgd

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.mpis("mpich")]

BATCHES = 4


def num_batches(rank, size, last):
    """Rank `last` has the most, the one after it none at all."""
    return BATCHES * ((rank - last - 1) % size) // (size - 1)


@pytest.mark.wide_in(4, "1,1")
@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("options", [{}, {"op": hvd.Sum}, {"gradient_predivide_factor": 2.0}])
@on_ranks(2, 3, 4, hosts=("1,1", "2,1"))
def test_a_rank_that_has_joined_counts_with_zeros(last, options):
    """The gradients are those of the ranks that have data, divided by the number of all."""
    size = hvd.size()
    twins = Twins(**options)
    for _ in range(2):
        for step, (x, y) in enumerate(batches(BATCHES, 2, size)):
            having = [r for r in range(size) if step < num_batches(r, size, last)]
            twins.reference.zero_grad()
            for r in having:
                loss = loss_of(twins.alone, own(x, r, size), own(y, r, size))
                (loss * twins.factor / size).backward()
            twins.reference.step()
            if hvd.rank() in having:
                twins.optimizer.zero_grad()
                loss_of(twins.net, *mine(x, y)).backward()
                twins.optimizer.step()
                assert_same_parameters(twins.net, twins.alone)
        assert hvd.join() == last
        # Ranks that joined before have missed steps.
        hvd.broadcast_parameters(twins.net.state_dict(), root_rank=last)
        assert_same_parameters(twins.net, twins.alone)


@on_ranks()
def test_what_is_found_out_while_a_rank_has_joined_does_not_separate_the_ranks():
    """While rank 1 has joined, rank 0 has a dense gradient, and later rank 1 a sparse one."""
    rank, size = hvd.rank(), hvd.size()
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(3, 2))
    # Rank 0 makes a step before the others' first one.
    optimizer = sgd([a, b], op=hvd.Sum, check_start=False)
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


@on_ranks()
def test_adasum_adds_nothing_of_a_rank_that_has_joined():
    p = nn.Parameter(torch.zeros(2))
    optimizer = sgd([p], op=hvd.Adasum)
    if hvd.rank() == 0:
        p.sum().backward()
        optimizer.step()
        assert p.tolist() == [-1.0, -1.0]
    hvd.join()
    hvd.broadcast_parameters([p], root_rank=0)
    p.grad = torch.tensor([1.0, 0.0])
    optimizer.step()
    assert p.tolist() == [-2.0, -1.0]


@on_ranks(hosts=("1,1",))
def test_new_buckets_are_an_error_while_a_rank_has_joined():
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1), requires_grad=False)
    optimizer = sgd([a, b])
    if hvd.rank() == 0:
        b.requires_grad_(True)
        for _ in range(2):
            with pytest.raises(hvd.HorovodInternalError, match="has joined"):
                (a + b).sum().backward()
            optimizer.zero_grad()
    hvd.join()
    assert hvd.allreduce(torch.ones(1)).item() == 1
