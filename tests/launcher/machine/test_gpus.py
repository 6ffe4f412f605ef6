"""Which GPU a rank will use, and what is near it, on made-up hosts: there is no GPU here."""

import os
import subprocess
import sys

import pytest

from hvdrun.machine import binding
from hvdrun.machine.gpus import driver_version, near_gpu, visible
from hvdrun.machine.remote_words import BOUND, VERBOSE
from hvdrun.machine.resources import parse_list
from tests.launcher.machine.test_binding import write

CPUS = parse_list("0-7")
# Four GPUs, two at each of two NUMA nodes; the numbers of their files in /dev are no order.
GPUS = {
    # address: minor, UUID, node
    "0000:3b:00.0": (1, "GPU-aa", 0),
    "0000:5e:00.0": (0, "GPU-ab", 0),
    "0000:af:00.0": (3, "GPU-ba", 1),
    "0000:d8:00.0": (2, "GPU-bb", 1),
}
H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


@pytest.fixture
def host(tmp_path):
    """host(...): makes the files of a host; returns its root."""

    def make(nodes=("0-3", "4-7"), models=(H100, H100, H100, H100), hidden=(), mig=False, **at):
        write(tmp_path / "sys/devices/system/cpu/online", "0-7")
        for number, cpus in enumerate(nodes):
            write(tmp_path / f"sys/devices/system/node/node{number}/cpulist", cpus)
        for (address, (minor, uuid, node)), model in zip(GPUS.items(), models, strict=False):
            information = f"Model: \t\t {model}\nIRQ:   \t\t 99\nGPU UUID: \t {uuid}\n"
            information += f"Bus Location: \t {address}\nDevice Minor: \t {minor}\n"
            folder = tmp_path / "proc/driver/nvidia/gpus" / address
            write(folder / "information", information + "GPU Excluded:\t No")
            node = at.get("node", node)
            write(tmp_path / f"sys/bus/pci/devices/{address}/numa_node", str(node))
            if minor not in hidden:
                write(tmp_path / f"dev/nvidia{minor}", "")
        if mig:
            write(tmp_path / "proc/driver/nvidia/capabilities/gpu0/mig/gi1/access", "")
        return str(tmp_path)

    return make


def places(root, size, usable=CPUS, **environ):
    """Per local rank: node, place among those whose GPU is there, and how many these are."""
    found = [near_gpu(environ, rank, size, usable, root) for rank in range(size)]
    return [near and (near.node, near.place, near.sharers) for near in found]


def test_each_rank_is_near_its_gpu(host):
    root = host()
    assert places(root, 4) == [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]
    assert places(root, 2, CUDA_VISIBLE_DEVICES="3,0") == [(1, 0, 1), (0, 0, 1)]
    assert places(root, 2, CUDA_VISIBLE_DEVICES="GPU-bb, GPU-aa") == [(1, 0, 1), (0, 0, 1)]
    assert places(root, 1, CUDA_VISIBLE_DEVICES="MIG-GPU-ba/1/0") == [(1, 0, 1)]
    assert places(root, 2, HVDLITE_GPU="2") == [(1, 0, 2), (1, 1, 2)]
    near = near_gpu({}, 2, 4, CPUS, root)
    assert (near.address, near.cpus) == ("0000:af:00.0", parse_list("4-7"))


def test_a_scheduler_may_show_each_task_its_own_gpu(host):
    # By number, or only the one of its device cgroup, which is number 0 then.
    # Where the others' are it doesn't show: all may be at this node.
    assert places(host(), 2, CUDA_VISIBLE_DEVICES="2") == [(1, 0, 2), (1, 1, 2)]
    assert places(host(), 2, CUDA_VISIBLE_DEVICES="GPU-ab") == [(0, 0, 2), (0, 1, 2)]


def test_a_gpu_that_the_process_may_not_open_has_no_number(host):
    root = host(hidden=(1, 0))
    assert places(root, 2) == [(1, 0, 2), (1, 1, 2)]
    assert places(root, 1, CUDA_VISIBLE_DEVICES="GPU-aa") == [None]


@pytest.mark.parametrize(
    ("made", "size", "environ"),
    [
        pytest.param({"node": -1}, 4, {}, id="firmware does not say"),
        pytest.param({"node": 7}, 4, {}, id="a node without cores"),
        pytest.param({"nodes": ("0-7",), "node": 0}, 4, {}, id="one node"),
        pytest.param({"nodes": ("0-7", "")}, 2, {}, id="all cores at one of the nodes"),
        pytest.param({"models": ()}, 4, {}, id="no GPU"),
        pytest.param({"models": (H100, A100)}, 2, {}, id="CUDA puts the fastest first"),
        pytest.param({"mig": True}, 4, {}, id="MIG instances have numbers too"),
        pytest.param({"mig": True}, 1, {"CUDA_VISIBLE_DEVICES": "0"}, id="a number beside MIG"),
        pytest.param({}, 1, {"CUDA_VISIBLE_DEVICES": "MIG-0a"}, id="a MIG instance of any GPU"),
        pytest.param({}, 1, {"CUDA_VISIBLE_DEVICES": ""}, id="hidden"),
        pytest.param({}, 1, {"CUDA_VISIBLE_DEVICES": "-1,0"}, id="ends before the first"),
        pytest.param({}, 1, {"CUDA_VISIBLE_DEVICES": "GPU-a"}, id="two begin like that"),
        pytest.param({}, 1, {"CUDA_VISIBLE_DEVICES": "9" * 5000}, id="no number"),
        pytest.param({}, 5, {}, id="more ranks than GPUs"),
        pytest.param({"models": (H100,)}, 2, {}, id="two ranks of which none gets the GPU"),
        pytest.param({}, 4, {"HVDLITE_GPU": "none"}, id="no GPU wanted"),
        pytest.param({}, 4, {"HVDLITE_GPU": "7"}, id="no such GPU"),
        pytest.param({}, 4, {"HVDLITE_GPU_BINDING": "0"}, id="switched off"),
        pytest.param({}, 4, {"HVDLITE_GPU_BINDING": " Off"}, id="switched off by a word"),
    ],
)
def test_no_rank_is_bound_to_a_gpu_that_is_not_known_or_not_near_anything(
    host, made, size, environ
):
    assert places(host(**made), size, **environ) == [None] * size


def test_two_models_have_an_order_only_by_address_or_by_name(host):
    root = host(models=(A100, A100, H100, H100))
    assert places(root, 2) == [None, None]
    assert places(root, 2, CUDA_VISIBLE_DEVICES="0,2") == [None, None]
    assert places(root, 2, CUDA_DEVICE_ORDER="FASTEST_FIRST") == [None, None]
    assert places(root, 3, CUDA_DEVICE_ORDER="PCI_BUS_ID")[2] == (1, 0, 1)
    assert places(root, 2, CUDA_VISIBLE_DEVICES="GPU-aa,GPU-ba") == [(0, 0, 1), (1, 0, 1)]


@pytest.mark.parametrize("usable", ["0-3", "0,4", "1-7"])
def test_who_is_bound_already_stays_so(host, usable):
    assert places(host(), 2, parse_list(usable)) == [None, None]


def test_a_gpu_with_a_name_that_is_no_text_is_a_gpu(host, tmp_path):
    root = host()
    path = tmp_path / "proc/driver/nvidia/gpus/0000:3b:00.0/information"
    path.write_bytes(path.read_bytes().replace(b"H100", b"H100\xae"))
    environ = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert [gpu.uuid for gpu in visible(environ, root)] == [uuid for _, uuid, _ in GPUS.values()]


def test_excluded_gpus_and_other_files_are_left_out(host, tmp_path):
    root = host()
    path = tmp_path / "proc/driver/nvidia/gpus/0000:3b:00.0/information"
    path.write_text(path.read_text().replace("Excluded:\t No", "Excluded:\t Yes"))
    assert [gpu.uuid for gpu in visible({}, root)] == ["GPU-ab", "GPU-ba", "GPU-bb"]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 2024\nGCC", "550"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159  Release 1.2", "580"),
        ("", ""),
    ],
)
def test_the_drivers_version_is_the_kernel_modules(tmp_path, text, version):
    write(tmp_path / "proc/driver/nvidia/version", text)
    assert driver_version(str(tmp_path)).partition(".")[0] == version


@pytest.mark.parametrize(
    ("size", "quota", "environ", "expected"),
    [
        # Per rank: its hardware threads, the number of threads, and whether these are by its GPU.
        (4, None, {}, [("0-1", 2, 1), ("2-3", 2, 1), ("4-5", 2, 1), ("6-7", 2, 1)]),
        (3, None, {}, [("0-1", 2, 1), ("2-3", 2, 1), ("4-7", 4, 1)]),
        pytest.param(
            3,
            None,
            {"CUDA_VISIBLE_DEVICES": "3,0,1"},
            [("4-7", 4, 1), ("0-1", 2, 1), ("2-3", 2, 1)],
            id="none gets fewer than the least otherwise, and no two the same",
        ),
        pytest.param(
            2,
            None,
            {"CUDA_VISIBLE_DEVICES": "2,1"},
            [("4-7", 4, 1), ("0-3", 4, 1)],
            id="a node each",
        ),
        pytest.param(
            4,
            4,
            {"CUDA_VISIBLE_DEVICES": "2,3,0,1"},
            [("4-5", 1, 1), ("6-7", 1, 1), ("0-1", 1, 1), ("2-3", 1, 1)],
            id="a quota",
        ),
        pytest.param(1, None, {}, [(None, 8, 0)], id="one rank keeps all cores"),
        pytest.param(2, None, {}, [("0-3", 4, 1), ("4-7", 4, 0)], id="two GPUs at one node"),
        pytest.param(
            2, None, {"HVDLITE_GPU": "2"}, [("0-3", 4, 0), ("4-7", 4, 1)], id="one GPU for two"
        ),
        pytest.param(
            4,
            None,
            {"CUDA_VISIBLE_DEVICES": "3"},
            [("0-1", 2, 0), ("2-3", 2, 0), ("4-5", 2, 1), ("6-7", 2, 1)],
            id="each knows only its own",
        ),
        pytest.param(
            2, None, {"HVDLITE_GPU_BINDING": "0"}, [("0-3", 4, 0), ("4-7", 4, 0)], id="switched off"
        ),
    ],
)
def test_ranks_are_near_their_gpus_where_that_costs_them_no_cores(
    host, monkeypatch, size, quota, environ, expected
):
    root = host()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(CPUS))
    monkeypatch.setattr(binding, "tightest_quota", lambda _: ("", quota))
    shares = [binding.here(rank, size, environ, root) for rank in range(size)]
    wanted = [(cpus and parse_list(cpus), threads, bool(near)) for cpus, threads, near in expected]
    assert [(share.cpus, share.threads, bool(share.near)) for share in shares] == wanted


# The rank's end of things, where its GPU is at node 0. In a process of its own, as it is for good.
RANK = """
import sys
from hvdrun.agent.rank import shim, spawn
from hvdrun.machine.binding import CpuShare
from hvdrun.machine.gpus import Near, prefer_memory_of

near = Near("0000:3b:00.0", 0, frozenset(), 0, 1, True)
spawn.here = lambda rank, size, environ: CpuShare(None, 1, near)
if sys.argv[1] == "again":
    prefer_memory_of(0)
    near = near._replace(node=63)  # there is a policy already, so this changes nothing
if sys.argv[1] == "no ctypes":
    sys.modules["_ctypes"] = None
shim.main(["cat", "/proc/self/numa_maps"], sys.argv[2])
"""


@pytest.mark.parametrize("again", ["once", "again", "no ctypes"])
@pytest.mark.parametrize("role", [BOUND, VERBOSE])
def test_the_command_inherits_the_memory_policy_and_the_user_can_see_it(again, role):
    done = subprocess.run(
        [sys.executable, "-c", RANK, again, role], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    said = f"is bound: its GPU 0000:3b:00.0 is at NUMA node {63 if again == 'again' else 0}\n"
    assert done.stderr.endswith(said) if role == VERBOSE else not done.stderr
    policies = {line.split()[1] for line in done.stdout.splitlines() if line}
    wanted = "default" if again == "no ctypes" else "prefer:0"
    if policies == {"default"} != {wanted}:
        pytest.skip("this machine lets nobody choose a memory policy")
    assert policies == {wanted}
