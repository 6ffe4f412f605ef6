"""share_parameters: one copy of a model per host."""

import pytest
import torch
from torch import nn

import hvdlite as hvd

pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.hosts("2,1", "2,2")]


class Structured(nn.Module):
    """Tied weights, views of one storage, and every kind of strides."""

    def __init__(self, rank):
        super().__init__()
        flat = torch.arange(24.0) + 100 * rank
        self.left = nn.Parameter(flat[:12].view(3, 4))
        self.right = nn.Parameter(flat[8:].view(4, 4))  # overlaps with the other
        self.transposed = nn.Parameter((torch.arange(6.0) + 100 * rank).view(2, 3).t())
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.encoder = nn.Embedding(5, 4)
        self.decoder = nn.Linear(4, 5)
        self.decoder.weight = self.encoder.weight
        self.narrow = nn.Parameter(torch.full((3,), float(rank), dtype=torch.bfloat16))
        self.scalar = nn.Parameter(torch.tensor(float(rank)))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.frozen = nn.Parameter(torch.tensor([rank, 7]), requires_grad=False)
        self.register_buffer("table", torch.arange(5) + rank)


def keeps_its_structure():
    hvd.init()
    rank = hvd.rank()
    lowest = rank - hvd.local_rank()
    torch.manual_seed(lowest)
    expected = Structured(lowest)
    torch.manual_seed(rank)
    model = Structured(rank)
    before = dict(model.named_parameters())
    strides = {name: p.stride() for name, p in before.items()}
    model.scalar.grad = torch.tensor(5.0)
    hvd.share_parameters(model)
    after = dict(model.named_parameters())
    assert all(after[name] is before[name] for name in before)
    assert {name: p.stride() for name, p in after.items()} == strides
    assert model.scalar.grad == 5
    assert model.decoder.weight is model.encoder.weight
    assert model.right.data_ptr() - model.left.data_ptr() == 8 * 4
    assert all(map(hvd.is_shared, after.values()))
    assert hvd.is_shared(model.conv.weight[1])
    assert not hvd.is_shared(model.table)
    assert not hvd.is_shared(torch.ones(3))
    for name, value in expected.named_parameters():
        assert torch.equal(after[name], value), name
    assert model.frozen.requires_grad is False
    assert model.left.data_ptr() % 64 == 0


def test_values_are_the_lowest_local_ranks_and_objects_strides_and_ties_stay(world):
    world.run(keeps_its_structure)


def one_rank_writes():
    hvd.init()
    model = nn.Linear(3, 2)
    hvd.share_parameters(model)
    hvd.barrier()
    if hvd.local_rank() == hvd.local_size() - 1:
        with torch.no_grad():
            model.weight.fill_(hvd.rank())
    hvd.barrier()
    highest = hvd.rank() - hvd.local_rank() + hvd.local_size() - 1
    assert model.weight.eq(highest).all()


def test_all_ranks_of_a_host_see_the_same_pages(world):
    world.run(one_rank_writes)
