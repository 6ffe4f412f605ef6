"""A model whose gradients DDP or FSDP reduces as well is an error that says what to remove."""

from datetime import timedelta

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hvdlite as hvd
from tests.harness.on_ranks import on_ranks
from tests.optimizer.models import model, sgd

pytestmark = [pytest.mark.ranks(2), pytest.mark.mpis("mpich")]


@pytest.fixture
def store(tmp_path):
    return str(tmp_path / "store")


def train(what, op, store):
    """At which of three steps an error comes, or -1 when it is wrapped; and the error."""
    file = torch.distributed.FileStore(store, hvd.size())
    torch.distributed.init_process_group(
        "gloo", store=file, rank=hvd.rank(), world_size=hvd.size(), timeout=timedelta(seconds=60)
    )
    made = -1
    try:
        net = model()
        if what == "FSDP2":
            fully_shard(net, mesh=torch.distributed.init_device_mesh("cpu", (hvd.size(),)))
        alone = torch.distributed.new_group([hvd.rank()], use_local_synchronization=True)
        ddp = None
        if what not in ("wrapped later", "FSDP2"):
            ddp = DistributedDataParallel(
                model() if what == "another model" else net,
                process_group=alone if what == "a group of one" else None,
            )
        if what == "gone":
            del ddp
        optimizer = sgd(net.parameters(), op=op)
        if what == "wrapped later":
            net = DistributedDataParallel(net)
        before = [param.detach().clone() for param in net.parameters()]
        for made in range(3):  # noqa: B007 - the error is in this one
            optimizer.zero_grad()
            net(torch.full((1, 6), hvd.rank() + 1.0, dtype=torch.float64)).sum().backward()
            optimizer.step()
    except RuntimeError as error:
        assert made == -1 or all(map(torch.equal, before, net.parameters())), "no step was made"
        return made, str(error)
    finally:
        torch.distributed.destroy_process_group()
    return None


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
@pytest.mark.parametrize(
    ("what", "name", "when"),
    [
        ("wrapped", "DistributedDataParallel", -1),
        ("wrapped later", "DistributedDataParallel", 0),
        ("FSDP2", "fully_shard", -1),
    ],
)
@on_ranks()
def test_gradients_that_torch_reduces_as_well_are_an_error_on_every_rank(
    what, name, when, op, store
):
    step, text = train(what, op, store)
    assert step == when
    assert text.startswith(f"DistributedOptimizer: {name}")
    assert "reduces the same gradients over 2 processes" in text
    assert f"remove {name}" in text


@pytest.mark.parametrize("what", ["another model", "a group of one", "gone"])
@on_ranks()
def test_nothing_is_said_of_ddp_where_it_reduces_none_of_these_gradients(what, store):
    assert train(what, hvd.Average, store) is None
