"""A model whose gradients DDP or FSDP reduces as well is an error that says what to remove."""

from datetime import timedelta

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hvdlite as hvd
from tests.optimizer.models import model

pytestmark = [pytest.mark.ranks(2), pytest.mark.mpis("mpich")]


def both(path, what, op):
    """What each rank is told: where, and its text."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    file = torch.distributed.FileStore(path, size)
    torch.distributed.init_process_group(
        "gloo", store=file, rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    try:
        return train(what, op)
    finally:
        torch.distributed.destroy_process_group()


def train(what, op):
    net = model()
    if what == "FSDP2":
        mesh = torch.distributed.init_device_mesh("cpu", (hvd.size(),))
        fully_shard(net, mesh=mesh)
    group = torch.distributed.new_group([hvd.rank()], use_local_synchronization=True)
    net_of_ddp = model() if what == "another model" else net
    ddp = None
    if what not in ("wrapped later", "FSDP2"):
        ddp = DistributedDataParallel(
            net_of_ddp, process_group=group if what == "a group of one" else None
        )
    if what == "gone":
        del ddp
    try:
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), op=op)
    except RuntimeError as error:
        return "at once", str(error)
    if what == "wrapped later":
        net = DistributedDataParallel(net)
    before = [param.detach().clone() for param in net.parameters()]
    for step in range(3):
        optimizer.zero_grad()
        try:
            net(torch.full((1, 6), hvd.rank() + 1.0, dtype=torch.float64)).sum().backward()
            optimizer.step()
        except RuntimeError as error:
            assert all(map(torch.equal, before, net.parameters())), "no step was made"
            return step, str(error)
    return None


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
@pytest.mark.parametrize(
    ("what", "when"), [("wrapped", "at once"), ("wrapped later", 0), ("FSDP2", "at once")]
)
def test_gradients_that_torch_reduces_as_well_are_an_error_on_every_rank(
    world, tmp_path, what, when, op
):
    name = "fully_shard" if what == "FSDP2" else "DistributedDataParallel"
    for told in world.run(both, str(tmp_path / "store"), what, op):
        assert told is not None
        assert told[0] == when
        assert told[1].startswith(f"DistributedOptimizer: {name}")
        assert "reduces the same gradients over 2 processes" in told[1]
        assert f"remove {name}" in told[1]


@pytest.mark.parametrize("what", ["another model", "a group of one", "gone"])
def test_nothing_is_said_of_ddp_where_it_reduces_none_of_these_gradients(world, tmp_path, what):
    assert world.run(both, str(tmp_path / "store"), what, hvd.Average) == [None, None]
