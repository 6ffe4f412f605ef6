"""Whether a queue's members form a group: decided once, alike on all of them."""

import logging
import os
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

import hvdlite as hvd
from hvdlite import gpu
from hvdlite.gpu.queue import GpuQueue
from hvdlite.gpu.setup import Facts, client_of, obstacle, own_addresses
from hvdlite.world import world
from tests.gpu.stand_in import HostDevices, allreduce, new_queue, result_of

several = pytest.mark.ranks(2, 3)


def facts(*devices, problem=""):
    return [
        Facts(rank, f"host{rank // 2}", device, problem if rank == 1 else "")
        for rank, device in enumerate(devices)
    ]


def test_members_with_a_device_each_form_a_group():
    assert obstacle(facts("GPU-a", "GPU-b", "GPU-c")) == ""
    assert obstacle(facts("")) == ""  # alone it shares none, whatever it is


def with_hosts(*hosts, shares=()):
    """Members that share a GPU, with these NCCL_HOSTIDs."""
    return [
        Facts(rank, "host0", "GPU-a", "", nccl_host=host, shares=rank in shares)
        for rank, host in enumerate(hosts)
    ]


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        (with_hosts("a", "b", "c"), ""),
        (with_hosts("a", "b", "a"), "ranks 0 and 2 on host0 share a GPU and NCCL_HOSTID=a"),
        (with_hosts("a", "", ""), "ranks 1 and 2 on host0 share a GPU"),
        (with_hosts("", "", shares=(0, 1)), ""),
        (with_hosts("", "", shares=(1,)), "ranks 0 and 1 on host0 share a GPU"),
    ],
)
def test_members_share_a_device_where_nccl_is_told_to_let_them(members, reason):
    assert obstacle(members) == reason


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        (facts("GPU-a", "GPU-b", "GPU-c", "GPU-b"), "ranks 1 and 3 on host1 share a GPU"),
        (facts("GPU-a", "", "GPU-c"), "rank 1 on host0 can't read its GPU's UUID"),
        (facts("GPU-a", "GPU-b", problem="no NCCL"), "rank 1 on host0: no NCCL"),
    ],
)
def test_what_keeps_them_from_it_is_named(members, reason):
    assert obstacle(members) == reason


def share_a_device(route):
    """All ranks have the same device; returns the results, and the log."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("hvdlite").addHandler(handler)
    try:
        queue = new_queue(route, HostDevices(identity="GPU-a"))
        outcomes = [allreduce(queue, name, torch.ones(3)) for name in ("first", "second")]
        texts = [transfer.wait() for transfer in outcomes]
        late = allreduce(queue, "late", torch.ones(3)).wait()
    finally:
        logging.getLogger("hvdlite").removeHandler(handler)
    sums = [transfer.value().tolist() for transfer in outcomes if transfer.failure is None]
    return sums, [*texts, late], [record.getMessage() for record in records]


@several
def test_ranks_that_share_a_device_stage_and_the_lowest_says_so(world):
    every = world.run(share_a_device, "auto")
    for rank, (sums, texts, logged) in enumerate(every):
        assert sums == [[world.size] * 3] * 2
        assert texts == [None] * 3
        said = "go through host memory: ranks 0 and 1 on "
        assert [said in line for line in logged] == ([True] if rank == 0 else [])


@several
def test_nccl_that_can_not_be_had_is_an_error_on_every_rank(world):
    every = world.run(share_a_device, "group")
    (texts,) = {tuple(texts) for _, texts, _ in every}
    for name, text in zip(("first", "second", "late"), texts, strict=True):
        assert f"allreduce '{name}': HVDLITE_GPU_COLLECTIVES=nccl, but the ranks can't" in text
        assert "ranks 0 and 1 on " in text


def share_by_nccl(host_ids, shared):
    os.environ.pop("NCCL_HOSTID", None)
    if host_ids:
        os.environ["NCCL_HOSTID"] = str(hvd.rank())
    try:
        queue = new_queue("auto", HostDevices(identity="GPU-a", shared=shared))
        result = result_of(allreduce(queue, "x", torch.ones(3))).tolist()
        return result, queue._group is not None
    finally:
        os.environ.pop("NCCL_HOSTID", None)


@several
@pytest.mark.parametrize("how", [(True, False), (False, True)], ids=["NCCL_HOSTID", "NCCL 2.30"])
def test_ranks_that_nccl_lets_share_a_device_form_a_group(world, how):
    assert world.run(share_by_nccl, *how) == [([world.size] * 3, True)] * world.size


class Unfit(HostDevices):
    """One whose group rank 1 can't use: it can't be made there, or adds wrongly."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def group(self, store, rank, size, device):
        if self.how == "is not made":
            raise OSError(f"rank {rank} has no network")
        group = super().group(store, rank, size, device)
        return Miscounting(group) if rank == 1 else group


class Miscounting:
    def __init__(self, group):
        self._group = group

    def allreduce(self, tensors, options):
        work = self._group.allreduce(tensors, options)
        work.wait()
        tensors[0] += 1
        return work


def try_an_unfit_group(route, how):
    queue = new_queue(route, Unfit(how))
    transfer = allreduce(queue, "x", torch.ones(3))
    return transfer.wait(), transfer.failure is None and transfer.value().tolist()


@several
@pytest.mark.parametrize("how", ["is not made", "adds wrongly"])
def test_a_group_that_fails_its_first_operation_on_one_rank_is_used_by_none(world, how):
    assert world.run(try_an_unfit_group, "auto", how) == [(None, [world.size] * 3)] * world.size
    (text,) = {text for text, _ in world.run(try_an_unfit_group, "group", how)}
    expected = {
        "is not made": "OSError: rank 0 has no network",
        "adds wrongly": f"RuntimeError: the sum of {world.size} ones was {world.size + 1}",
    }
    assert expected[how] in text


def pretend_to_be_apart():
    """Each rank has a host of its own name: they meet at member 0's addresses."""
    queue = new_queue("group")
    real, host = socket.gethostname, f"host of {hvd.rank()}"
    socket.gethostname = lambda: host
    try:
        return result_of(allreduce(queue, "x", torch.ones(3))).tolist()
    finally:
        socket.gethostname = real


@several
def test_members_on_several_hosts_meet_at_an_address_of_the_first(world):
    assert world.run(pretend_to_be_apart) == [[world.size] * 3] * world.size


@pytest.fixture
def server():
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20), wait_for_workers=False
    )
    store.set("hvdlite", "right")
    return store


def members_at(port, nonce, *addresses):
    return [Facts(0, "a", "GPU-a", "", addresses, port, nonce), Facts(1, "b", "GPU-b", "")]


def test_an_address_that_leads_nowhere_is_passed_over(server):
    members = members_at(server.port, "right", "no-such-host.invalid", "127.0.0.1")
    client = client_of(members)
    client.set("key", "value")
    assert server.get("key") == b"value"


def test_a_store_that_is_not_the_first_members_is_not_taken(server):
    with pytest.raises(ConnectionError, match=r"rank 0 on a can't be reached .*another store"):
        client_of(members_at(server.port, "other", "127.0.0.1"))


def test_a_hosts_addresses_do_not_lead_back_to_the_host_that_asks():
    addresses = list(own_addresses())
    assert addresses[-1] == socket.gethostname()
    assert not any(address.startswith("127.") for address in addresses[:-1])


def choose():
    hvd.init()
    queue = gpu.queue_of(world.current().team)
    assert isinstance(queue, GpuQueue)
    assert gpu.queue_of(world.current().team) is queue
    connect = queue._connect
    return getattr(connect, "keywords", {}).get("choice", "stage everything")


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("knobs", "choice"),
    [
        ({}, "auto"),
        ({"HVDLITE_GPU_COLLECTIVES": "nccl"}, "nccl"),
        ({"HVDLITE_GPU_COLLECTIVES": "staged"}, "stage everything"),
        # NCCL adds in an order of its own.
        ({"HVDLITE_DETERMINISTIC": "1"}, "stage everything"),
        ({"HVDLITE_DETERMINISTIC": "1", "HVDLITE_GPU_COLLECTIVES": "nccl"}, "nccl"),
    ],
)
def test_the_knobs_choose_the_way(world, knobs, choice):
    assert world.run(choose, knobs=knobs) == [choice]


def choose_differently():
    hvd.init()
    rank = hvd.rank()
    hvd.shutdown()
    os.environ["HVDLITE_GPU_COLLECTIVES"] = "staged" if rank else "nccl"
    try:
        hvd.init()
    except hvd.HorovodInternalError as error:
        return str(error)
    finally:
        del os.environ["HVDLITE_GPU_COLLECTIVES"]
    raise AssertionError("no error")


@pytest.mark.ranks(2)
def test_ranks_with_different_choices_do_not_start(world):
    (text,) = set(world.run(choose_differently))
    assert "HVDLITE_GPU_COLLECTIVES is staged on rank 1 and nccl on rank 0" in text


def test_a_job_without_gpu_tensors_loads_nothing_of_it():
    code = (
        "import sys, torch, hvdlite as hvd; hvd.init(); hvd.allreduce(torch.ones(2));"
        "print(sorted(m for m in sys.modules if m.startswith('hvdlite.gpu')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "hvdlite.gpu.queue" not in done.stdout
