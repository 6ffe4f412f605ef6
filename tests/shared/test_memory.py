"""The memory that a host's ranks share: how much it is, who reaches it, and worlds without MPI."""

import gc
import os
import re
import subprocess
import sys

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

import hvdlite as hvd
from hvdlite.shared import memory
from tests.harness.needs import lacking

MIB = 1 << 20
COPY_BYTES = 64 * MIB


def pss_bytes():
    hvd.barrier()
    return int(psutil.Process().memory_full_info().pss)


class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(COPY_BYTES // 4))


def parameters():
    model = Large()
    hvd.share_parameters(model)
    return model


def data():
    return hvd.shared_tensor(COPY_BYTES, torch.uint8, lambda tensor: tensor.fill_(1))


def taken(make):
    hvd.init()
    before = pss_bytes()
    kept = make()
    tensors = kept.parameters() if isinstance(kept, nn.Module) else [kept]
    assert all(tensor.view(torch.uint8).max() > 0 for tensor in tensors)  # reads every page
    return pss_bytes() - before


@pytest.mark.ranks(4)
@pytest.mark.parametrize("make", [parameters, data])
def test_four_ranks_have_one_copy(world, make):
    # PSS divides each page by the processes that have it. Unshared, it would be four copies. Less
    # than one: a process of another test that starts meanwhile takes its share of the libraries.
    assert 0.5 * COPY_BYTES < sum(world.run(taken, make)) < 2 * COPY_BYTES


def memfd():
    """A path by which root could open a region of this process."""
    hvd.init()
    gc.collect()  # earlier regions go now, and not while this looks at them
    model = nn.Linear(2, 2)
    hvd.share_parameters(model)
    folder = f"/proc/{os.getpid()}/fd"
    found = [f"{folder}/{fd}" for fd in os.listdir(folder) if region(f"{folder}/{fd}")]
    other = {"user": 65534, "group": 65534, "extra_groups": [], "cwd": "/"}
    opened = [
        path
        for path in found
        if subprocess.run(["cat", path], **other, capture_output=True).returncode == 0
    ]
    hvd.barrier()
    assert found
    assert all(region(path) for path in found)
    assert not opened


def region(path):
    try:
        return "memfd:hvdlite" in os.readlink(path)
    except OSError:
        return False


@pytest.mark.ranks(2)
def test_another_user_reaches_none_of_it(world):
    if os.geteuid() != 0:
        lacking("only root can become another user")
    world.run(memfd)


def separate():
    hvd.init()
    model = nn.Linear(2, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "open_shared", lambda *arguments, **options: None)
        for share in (lambda: hvd.share_parameters(model), lambda: hvd.shared_tensor(3)):
            with pytest.raises(hvd.HorovodInternalError, match=r"can't share memory: .*--ipc"):
                share()
    assert not hvd.is_shared(model.weight)
    hvd.share_parameters(model)
    assert hvd.is_shared(model.weight)


@pytest.mark.ranks(2)
@pytest.mark.hosts("2,1")
@pytest.mark.mpis("mpich")
def test_ranks_that_can_not_share_memory_get_an_error_that_says_what_to_do(world):
    world.run(separate)


WITHOUT_MPI = """
import torch
import hvdlite as hvd
hvd.init()
assert hvd.size() == 2
model = torch.nn.Linear(3, 2)
hvd.share_parameters(model)
hvd.barrier()
model.load_state_dict({n: torch.full_like(p, 2.0) for n, p in model.named_parameters()})
hvd.broadcast_parameters(model.state_dict(), 1)
assert model.weight.eq(2).all() and hvd.is_shared(model.weight)
data = hvd.shared_tensor((4,), fill=lambda part, begin: part.fill_(begin + 1), parts=True)
print("data", data.tolist())
"""


def test_ranks_without_mpi_share_too():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", WITHOUT_MPI],
            env={**os.environ, **variables, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for output in outputs:
        assert re.search(r"data \[1\.0, 1\.0, 3\.0, 3\.0\]", output), output
