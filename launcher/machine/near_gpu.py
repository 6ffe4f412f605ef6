"""The NUMA node of a rank's GPU. A rank on another node reaches its GPU through the link between
the sockets, which all ranks there share."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hvdrun.machine.cgroups import read
from hvdrun.machine.gpus import MOST_DIGITS, Gpu, visible
from hvdrun.machine.topology import CPUS, NODES, parse_list

SWITCH = "HVDLITE_GPU_BINDING"
# set_mempolicy and get_mempolicy, which the C library has no functions for.
SYSTEM_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
DEFAULT, PREFERRED = 0, 1
MOST_NODES = 1024


class Near:
    """The node of a rank's GPU, with the node's usable hardware threads. The rank is number `index`
    of the `sharers` local ranks whose GPUs are there. is_roomy: whether each local rank gets at its
    GPU's node as many hardware threads as its even share of the host's."""

    __slots__ = ("address", "cpus", "index", "is_roomy", "node", "sharers")

    def __init__(
        self,
        address: str,
        node: int,
        cpus: frozenset[int],
        index: int,
        sharers: int,
        is_roomy: bool,
    ) -> None:
        self.address = address
        self.node = node
        self.cpus = cpus
        self.index = index
        self.sharers = sharers
        self.is_roomy = is_roomy

    def __str__(self) -> str:
        return f"its GPU {self.address} is at NUMA node {self.node}"


def near_gpu(
    environ: Mapping[str, str],
    local_rank: int,
    local_size: int,
    usable: frozenset[int],
    root: str = "/",
) -> Near | None:
    """None if the GPU or its node is not known, if there is only one node, or if this process is
    bound already: what a scheduler or the user has chosen stays. All ranks of the host that see the
    same GPUs come to the same conclusion, as each gets a part of the same cores."""
    is_off = environ.get(SWITCH, "1").strip().lower() in ("0", "false", "no", "off", "")
    online = parse_list(read(f"{root}/{CPUS}/online"))
    if is_off or not online or online - usable:
        return None
    local = _of_ranks(environ, local_size, root)
    nodes = [read(f"{root}/sys/bus/pci/devices/{gpu.address}/numa_node") for gpu in local]
    cpus = [usable & parse_list(read(f"{root}/{NODES}/node{node}/cpulist")) for node in nodes]
    if not local or not all(cpus) or usable in cpus:
        return None
    node = nodes[local_rank]
    sharers, index = nodes.count(node), nodes[:local_rank].count(node)
    even = len(usable) // local_size
    is_roomy = all(len(c) // nodes.count(n) >= even for n, c in zip(nodes, cpus, strict=True))
    address = local[local_rank].address
    return Near(address, int(node), cpus[local_rank], index, sharers, is_roomy)


def _of_ranks(environ: Mapping[str, str], local_size: int, root: str) -> list[Gpu]:
    """The GPUs that hvdlite will choose for the local ranks (see hvdlite's `gpu_pinning`), or none.
    A rank that sees only its own does not know where the others' are: perhaps at the same node."""
    devices = visible(environ, root) or []
    knob = environ.get("HVDLITE_GPU", "auto").strip()
    if knob.isdecimal() and len(knob) <= MOST_DIGITS:
        return devices[int(knob) :][:1] * local_size
    if knob != "auto":
        return []
    if len(devices) >= local_size:
        return devices[:local_size]
    # A scheduler may show each task its own GPU.
    is_own = len(devices) == 1 and "CUDA_VISIBLE_DEVICES" in environ
    return devices * local_size if is_own else []


def prefer_memory_of(node: int) -> None:
    """New memory of this process, and of all that it starts, comes from this node while there is
    some. A policy that the user has set (numactl) stays; a container may forbid the call, and a
    Python may lack ctypes."""
    try:
        import ctypes

        call = ctypes.CDLL(None).syscall
    except (ImportError, OSError):
        return
    numbers = SYSTEM_CALLS.get(os.uname().machine)
    if numbers is None or node >= MOST_NODES:
        return
    mode = ctypes.c_int(DEFAULT)
    nodes = (ctypes.c_ulong * (MOST_NODES // 64))()
    nodes[node // 64] = 1 << node % 64
    if call(numbers[1], ctypes.byref(mode), None, 0, None, 0) == 0 and mode.value == DEFAULT:
        # The kernel takes one bit less than it is told.
        call(numbers[0], PREFERRED, nodes, ctypes.c_ulong(MOST_NODES + 1))
