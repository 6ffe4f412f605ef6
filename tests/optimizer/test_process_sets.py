"""Optimizers of some of the ranks."""

import pytest
import torch
from torch import nn

import hvdlite as hvd
from tests.harness.on_ranks import on_ranks
from tests.optimizer.models import OPTIMIZERS, Twins, batches, own, sgd

pytestmark = [pytest.mark.ranks(3, 4), pytest.mark.mpis("mpich")]


@pytest.mark.wide_in(4, "1,2")
@pytest.mark.parametrize("members", [(0, 2), (1,), (1, 2)])
@pytest.mark.parametrize("options", [{}, {"gradient_predivide_factor": 4.0}, {"op": hvd.Sum}])
@on_ranks(3, 4, hosts=("2,1", "1,2"))
def test_the_members_train_as_one_process_on_their_joined_batch(members, options):
    process_set = hvd.add_process_set(members)
    twins = Twins(OPTIMIZERS["Adam"], process_set=process_set, **options)
    if process_set.included():
        twins.train(batches(6, 2, process_set.size()))
        return
    # A rank outside the set trains on rows of its own, and for longer.
    rank = hvd.rank()
    for joined in batches(7 + rank, 2, rank + 1):
        x, y = (own(each, rank, rank + 1) for each in joined)
        twins.zero_grad()
        for net, _ in twins.both:
            nn.functional.mse_loss(net(x), y).backward()
        twins.step()


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
@on_ranks()
def test_the_optimizer_of_a_set_that_this_rank_is_no_member_of_communicates_nothing(op):
    """Over the same parameters, made on all ranks: the other set's is the newest here or there."""
    rank, size = hvd.rank(), hvd.size()
    sets = [hvd.add_process_set([0, 1]), hvd.add_process_set(range(2, size))]
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizers = [sgd([p], process_set=each, op=op) for each in sets]
    first = sets[0].included()
    mine, other = optimizers if first else optimizers[::-1]
    assert type(mine).__mro__[1:] == type(other).__mro__[1:]
    (p * (rank + 1)).sum().backward()
    mine.step()
    members = sets[0 if first else 1].ranks
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
    for each in sets:
        hvd.remove_process_set(each)
    # It stays what it was, but none is made of a set that is gone.
    other.step()
    with pytest.raises(ValueError, match="is not registered"):
        sgd([p], process_set=sets[0], op=op)


@on_ranks()
def test_two_optimizers_work_on_overlapping_sets_at_once():
    """Rank 1 is in both sets, and trains two models at once; one backward reaches both."""
    params = [nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(3)]
    sets = [hvd.add_process_set([0, 1]), hvd.add_process_set([1, 2]), hvd.global_process_set]
    mine = [(p, s) for p, s in zip(params, sets, strict=True) if s.included()]
    optimizers = [sgd([p], process_set=s) for p, s in mine]
    for _ in range(3):
        (sum(p for p, _ in mine) * (hvd.rank() + 1)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for p, s in mine:
        assert p.item() == pytest.approx(-3 * sum(r + 1 for r in s.ranks) / s.size())


@on_ranks()
def test_an_optimizer_goes_on_with_a_set_that_is_registered_again():
    process_set = hvd.add_process_set([0, 1])
    p = nn.Parameter(torch.zeros(1))
    is_member = process_set.included()
    optimizer = sgd([p], process_set=process_set, op=hvd.Sum) if is_member else None
    for _ in range(2):
        if is_member:
            optimizer.zero_grad()
            p.sum().backward()
            assert p.grad.item() == 2
            optimizer.step()
        hvd.remove_process_set(process_set)
        if is_member:
            optimizer.zero_grad()
            with pytest.raises(ValueError, match="is not registered"):
                p.sum().backward()
            optimizer.zero_grad()
        # The same object, that the optimizer knows.
        hvd.add_process_set(process_set)


@on_ranks()
def test_the_rows_of_sparse_gradients_are_those_of_the_members():
    process_set = hvd.add_process_set([0, 2])
    if process_set.included():
        torch.manual_seed(1)
        table = nn.Embedding(3, 2, sparse=True)
        optimizer = sgd(table.parameters(), process_set=process_set)
        for _ in range(2):
            optimizer.zero_grad()
            table(torch.tensor([hvd.rank()])).sum().backward()
            assert table.weight.grad.to_dense().tolist() == [[0.5] * 2, [0.0] * 2, [0.5] * 2]


@on_ranks()
def test_errors_name_the_ranks_as_the_world_counts_them():
    process_set = hvd.add_process_set([1, 2])
    if process_set.included():
        p = nn.Parameter(torch.zeros(hvd.rank()))
        optimizer = sgd([p], names=[("w", p)], process_set=process_set)
        words = r"'w' float32\[1\] on rank 1, 'w' float32\[2\] on rank 2"
        with pytest.raises(hvd.HorovodInternalError, match=words):
            p.sum().backward()
        optimizer.zero_grad()
