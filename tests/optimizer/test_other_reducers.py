"""A model that DDP has wrapped is reduced twice: one warning names both reducers."""

import warnings
from datetime import timedelta

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import hvdlite as hvd
from tests.optimizer.models import model

pytestmark = [pytest.mark.ranks(2), pytest.mark.mpis("mpich")]


def both(path, what, op):
    """What each rank is told in each of three steps."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    file = torch.distributed.FileStore(path, size)
    torch.distributed.init_process_group(
        "gloo", store=file, rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    try:
        net = model()
        group = torch.distributed.new_group([rank], use_local_synchronization=True)
        net_of_ddp = model() if what == "another model" else net
        ddp = DistributedDataParallel(
            net_of_ddp, process_group=group if what == "a group of one" else None
        )
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), op=op)
        if what == "gone":
            del ddp
        texts = []
        for step in range(3):
            optimizer.zero_grad()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loss = (net if what in ("gone", "another model") else ddp)(
                    torch.full((1, 6), rank + 1.0, dtype=torch.float64)
                )
                loss.sum().backward()
                optimizer.step()
            texts += [(step, str(each.message)) for each in caught]
        return texts
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_a_gradient_that_ddp_reduces_as_well_is_said_once(world, tmp_path, op):
    first, second = world.run(both, str(tmp_path / "store"), "wrapped", op)
    assert second == []
    [(step, text)] = first
    assert step == 0
    assert text.startswith(
        "DistributedOptimizer: DistributedDataParallel reduces the same gradients over 2 processes"
    )
    assert "remove DistributedDataParallel or DistributedOptimizer" in text


@pytest.mark.parametrize("what", ["another model", "a group of one", "gone"])
def test_nothing_is_said_of_ddp_where_it_reduces_none_of_these_gradients(world, tmp_path, what):
    assert world.run(both, str(tmp_path / "store"), what, hvd.Average) == [[], []]
