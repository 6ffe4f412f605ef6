"""broadcast_parameters with tensors that the ranks of a host have in common."""

import contextlib

import pytest
import torch
from torch import nn

import hvdlite as hvd
from hvdlite.shared import broadcasting

pytestmark = [
    pytest.mark.ranks(1, 2, 3),
    pytest.mark.hosts("2,1", "2,2"),
    pytest.mark.wide_in(1, 3, "2,2", "mpich"),
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(7, 5))
        self.conv = nn.Parameter(torch.empty(2, 3, 2, 2).to(memory_format=torch.channels_last))
        self.complex = nn.Parameter(torch.empty(3, dtype=torch.complex64))
        self.tiny = nn.Parameter(torch.empty(9).to(torch.float8_e4m3fn), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(0.0))
        self.empty = nn.Parameter(torch.empty(0, 2))
        self.register_buffer("counts", torch.empty(4, dtype=torch.int64))


def expected(tensor, rank):
    numbers = torch.arange(tensor.numel()).remainder(16) + rank
    return numbers.to(tensor.dtype).reshape(tensor.shape)


def raw(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


@contextlib.contextmanager
def small_chunks():
    before, broadcasting.CHUNK_BYTES = broadcasting.CHUNK_BYTES, 64
    try:
        yield
    finally:
        broadcasting.CHUNK_BYTES = before


def broadcasts():
    hvd.init()
    model = Net()
    hvd.share_parameters(model)
    wrong = []
    with small_chunks():
        for root in range(hvd.size()):
            leader = hvd.rank() - hvd.local_rank()
            hvd.barrier()
            if hvd.rank() == leader:
                with torch.no_grad():
                    for tensor in model.parameters():
                        tensor.copy_(expected(tensor, leader))
            model.counts.copy_(expected(model.counts, hvd.rank()))
            hvd.broadcast_parameters(model.state_dict(), root)
            source = hvd.allgather_object(leader)[root]
            for name, tensor in model.named_parameters():
                if raw(tensor) != raw(expected(tensor, source)):
                    wrong.append((root, name))
            if not torch.equal(model.counts, expected(model.counts, root)):
                wrong.append((root, "counts"))
        # Also as a list of tensors, which have no names.
        hvd.broadcast_parameters(list(model.parameters()), 0)
    assert not wrong


def test_every_host_gets_the_values_of_the_roots_host(world):
    world.run(broadcasts)


def only_some_are_shared():
    """One host has shared its parameters, the others have not."""
    hvd.init()
    model = Net()
    hvd.share_parameters(model)
    if hvd.rank() >= 2:
        for p in model.parameters():
            p.data = p.data.clone()
    for p in model.parameters():
        p.data.copy_(expected(p, hvd.rank() - hvd.local_rank()))
    with small_chunks():
        hvd.broadcast_parameters(model.named_parameters(), hvd.size() - 1)
    source = hvd.allgather_object(hvd.rank() - hvd.local_rank())[-1]
    assert all(torch.equal(p, expected(p, source)) for p in (model.weight, model.conv))


@pytest.mark.wide
def test_hosts_that_have_shared_and_hosts_that_have_not_go_together(world):
    world.run(only_some_are_shared)


def part_of_a_host():
    hvd.init()
    model = nn.Linear(2, 1)
    hvd.share_parameters(model)
    if hvd.size() == 1:
        return
    last = hvd.add_process_set([hvd.size() - 1])
    if last.included() and hvd.local_size() > 1:
        text = r"share parameters, but the process set has only \[.*\] of them"
        with pytest.raises(hvd.HorovodInternalError, match=text):
            hvd.broadcast_parameters(model.state_dict(), hvd.rank(), last)
    elif last.included():
        hvd.broadcast_parameters(model.state_dict(), hvd.rank(), last)
    hvd.remove_process_set(last)


def test_a_process_set_has_all_ranks_of_a_host_or_none(world):
    world.run(part_of_a_host)


def different():
    hvd.init()
    model = nn.Linear(2, 3)
    hvd.share_parameters(model)
    weight = model.weight.detach()
    name = {"w": weight.t() if hvd.rank() == hvd.size() - 1 else weight}
    if hvd.size() > 1:
        with pytest.raises(hvd.HorovodInternalError, match=r"'w' differs: float32\[3, 2\] on rank"):
            hvd.broadcast_parameters(name, 0)


def test_shared_tensors_that_differ_are_an_error(world):
    world.run(different)
