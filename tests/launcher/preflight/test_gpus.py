"""What preflight concludes from the GPUs and the RDMA devices of several hosts."""

import pytest

from hvdrun.plan.request import Request
from hvdrun.preflight.gpus import differences
from tests.launcher.preflight.answers import facts_of

H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100"
FOUR = {"gpus": 4, "gpu_models": (H100,) * 4, "gpu_driver": "580.159"}
RDMA = {**FOUR, "rdma": ("mlx5_0", "mlx5_1")}


def warnings(*hosts, environ=None, **exports):
    """The warnings about hosts with these facts: server1, server2, …"""
    known = {f"server{i}": facts_of(**changes) for i, changes in enumerate(hosts, 1)}
    found = list(differences(known, Request(("x",), exports=exports), environ or {}))
    assert all(f.host == "server1" and f.remedy and not f.failure for f in found)
    return [finding.text for finding in found]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"gpu_driver": "550.54"}, id="driver"),
        pytest.param({"gpu_models": (A100,) * 4}, id="model"),
        pytest.param({"gpus": 2}, id="count"),
        pytest.param({"gpus": 0, "gpu_models": ()}, id="none"),
        pytest.param({"gpu_models": (H100, H100, A100, H100)}, id="one of another model"),
    ],
)
def test_gpus_that_differ_between_hosts_are_one_warning(changes):
    other = {**FOUR, **changes}
    assert warnings(FOUR, FOUR) == []
    assert warnings(other, other) == []
    assert warnings(other) == []
    assert len(warnings(FOUR, other)) == 1


def test_the_warning_names_the_hosts_by_what_they_have():
    mixed = {**FOUR, "gpu_models": (H100, A100, H100, H100), "gpu_driver": "550.54"}
    bare = {"gpus": 2}  # what a container shows that hides the driver's files
    (warning,) = warnings(FOUR, mixed, FOUR, bare, {}, FOUR, FOUR)
    assert warning == (
        "GPUs differ between hosts: server1, server3, server6 and 1 more 4 x H100 80GB HBM3"
        " (driver 580.159), server2 3 x H100 80GB HBM3 and 1 x A100 (driver 550.54),"
        " server4 2 x GPU, server5 no GPU"
    )


def test_sockets_where_there_is_rdma_are_a_warning():
    text = "makes NCCL use sockets, and the hosts have RDMA devices (mlx5_0)"
    assert warnings(RDMA, RDMA) == []
    assert warnings(RDMA, RDMA, NCCL_IB_DISABLE="1") == [f"NCCL_IB_DISABLE {text}"]
    assert warnings(RDMA, RDMA, environ={"NCCL_NET": "socket"}) == [f"NCCL_NET {text}"]
    assert warnings(RDMA, RDMA, environ={"NCCL_NET": "Socket"}, NCCL_NET="IB") == []
    assert warnings(RDMA, RDMA, environ={"NCCL_IB_DISABLE": "0"}) == []
    assert warnings(RDMA, environ={"NCCL_IB_DISABLE": "1"}) == []
    assert warnings(FOUR, FOUR, environ={"NCCL_IB_DISABLE": "1"}) == []
    assert warnings({"rdma": ("mlx5_0",)}, {"rdma": ("mlx5_0",)}, NCCL_IB_DISABLE="1") == []


def test_rdma_on_some_hosts_only_is_a_warning_unless_sockets_are_wanted():
    text = "server2 has RDMA devices (mlx5_0), server1, server3 have none"
    assert warnings(FOUR, RDMA, FOUR) == [text]
    assert warnings(FOUR, RDMA, FOUR, NCCL_IB_DISABLE="1") == []
