"""What hvdrun finds out about its own environment and machine."""

import os
import socket
from ipaddress import ip_address

import psutil
import pytest

from hvdrun.machine.interfaces import interfaces
from hvdrun.machine.resources import gpu_count, physical_cores
from hvdrun.plan.facts import gather, local_names, own_path
from hvdrun.plan.request import Request


@pytest.mark.parametrize(
    ("path", "prefix", "expected"),
    [
        ("/bin", "/env", "/env/bin:/bin"),
        ("/bin:/env/bin", "/env", "/bin:/env/bin"),
        ("", "/env", f"/env/bin:{os.defpath}"),
        ("", "/usr", os.defpath),
        ("/bin", "/usr", "/bin"),
    ],
    ids=["not active", "active", "no PATH", "neither", "no virtual environment"],
)
def test_python_is_that_of_hvdruns_environment_also_where_it_is_not_active(path, prefix, expected):
    assert own_path(path, prefix, base_prefix="/usr") == expected


def test_the_interfaces_are_those_that_the_system_shows():
    def others_reach(address):
        return not (address.is_loopback or address.is_link_local)

    shown = {
        (name, ip_address(found.address.partition("%")[0]))
        for name, addresses in psutil.net_if_addrs().items()
        for found in addresses
        if found.family in (socket.AF_INET, socket.AF_INET6)
    }
    seen = {(found["name"], ip_address(str(found["address"]))) for found in interfaces()}
    assert {one for one in seen if others_reach(one[1])} == {
        one for one in shown if others_reach(one[1])
    }


@pytest.mark.parametrize("function", ["if_indextoname", "socket"])
def test_an_interface_that_has_gone_or_cannot_be_seen_is_none(monkeypatch, function):
    def fails(*_):
        raise OSError(19, "No such device")

    monkeypatch.setattr(f"hvdrun.machine.interfaces.socket.{function}", fails)
    assert interfaces() == []


def test_names_and_addresses_of_this_machine_need_no_ssh():
    addresses = {str(found["address"]) for found in interfaces()}
    hosts_file = "127.0.1.1 Me.site me\n10.255.0.9 other # me\n\n"
    names = local_names("Node7", hosts_file + "".join(f"{a} of-{a}\n" for a in addresses))
    assert names >= {"localhost", "::1", "node7", "127.0.1.1", "me.site", "me"}
    assert names >= {socket.gethostname().lower(), *addresses, *(f"of-{a}" for a in addresses)}
    assert not names & {"", "10.255.0.9", "other", "#"}
    # What this machine calls itself is the name of another one for whoever writes a host list.
    assert socket.gethostname() not in local_names("", f"10.255.0.9 {socket.gethostname()}\n")


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 2),
        ("0,1", 2),
        (" 1 ", 1),
        ("", 0),
        ("-1", 0),
        ("0,-1,1", 1),
        ("0,1,2,3", 2),
        ("2,0", 0),
        ("GPU-8932f937,GPU-5f4b3d1e", 2),
        ("NoDevFiles", 0),
    ],
)
@pytest.mark.parametrize("where", ["proc/driver/nvidia/gpus/0000:0{}:00.0", "dev/nvidia{}"])
def test_gpus_are_counted_as_cuda_does(tmp_path, where, visible, count):
    assert gpu_count(visible, str(tmp_path)) == 0
    for number in range(2):
        (tmp_path / where.format(number)).mkdir(parents=True)
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / "dev" / name).mkdir(parents=True)
    assert gpu_count(visible, str(tmp_path)) == count


def test_the_gpus_are_those_that_the_ranks_will_see(monkeypatch):
    monkeypatch.setattr("hvdrun.plan.facts.gpu_count", lambda visible: visible)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert gather(Request(())).gpus == "0,1"
    assert gather(Request((), exports={"CUDA_VISIBLE_DEVICES": ""})).gpus == ""
    assert gather(Request((), exports={"CUDA_VISIBLE_DEVICES": None})).gpus == "0,1"


@pytest.mark.parametrize(
    ("quota", "count"), [("max", 4), ("250000", 2), ("50000", 1), ("900000", 4)]
)
def test_a_container_has_no_more_cores_than_its_quota(tmp_path, monkeypatch, quota, count):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text(f"{quota} 100000\n")
    assert physical_cores(str(tmp_path)) == count
