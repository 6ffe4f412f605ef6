"""The NVIDIA GPUs of this host as its driver's files show them, without CUDA, and the NUMA node of
a rank's GPU. A rank on another node reaches its GPU through the link between the sockets, which all
ranks there share. Loaded beside each rank, hence little of the standard library."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from hvdrun.machine.limits import read
from hvdrun.machine.resources import CPUS, NODES, parse_list

DRIVER = "proc/driver/nvidia"
MOST_DIGITS = 4  # of a device's number


class Gpu(NamedTuple):
    """address: on the PCI bus, as in 0000:3b:00.0; minor: N of its /dev/nvidiaN."""

    address: str
    minor: str
    model: str
    uuid: str


def names_in(folder: str) -> list[str]:
    """Sorted; none if there is no such folder."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def gpus(root: str = "/") -> list[Gpu]:
    """All that the driver drives, in the order of their addresses."""
    found = []
    for address in names_in(f"{root}/{DRIVER}/gpus"):
        fields = {}
        for line in read(f"{root}/{DRIVER}/gpus/{address}/information").splitlines():
            name, _, value = line.partition(":")
            fields[name.strip()] = value.strip()
        if fields.get("GPU Excluded") != "Yes":
            wanted = (fields.get(name, "") for name in ("Device Minor", "Model", "GPU UUID"))
            found.append(Gpu(address.lower(), *wanted))
    return found


def driver_version(root: str = "/") -> str:
    """As in 580.159; "" without a driver."""
    first = read(f"{root}/{DRIVER}/version").partition("\n")[0]
    return next((w for w in first.split() if w[0].isdigit() and "." in w), "")


def visible(environ: Mapping[str, str], root: str = "/") -> list[Gpu] | None:
    """The devices 0, 1, … of CUDA in a process with these variables; None: they are not known.

    A number in CUDA_VISIBLE_DEVICES counts the devices that the process may open. CUDA puts the
    fastest first, unless CUDA_DEVICE_ORDER says PCI_BUS_ID; GPUs of one model are assumed to stay
    in the order of their addresses. Between two models, and beside MIG instances, a number says
    nothing without CUDA.
    """
    usable = [
        gpu
        for gpu in gpus(root)
        # A scheduler's device cgroup refuses the others, and a container lacks them.
        if os.access(f"{root}/dev/nvidia{gpu.minor}", os.R_OK | os.W_OK)
    ]
    by_address = environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    are_numbered = not _has_mig(root) and (by_address or len({gpu.model for gpu in usable}) < 2)
    words = environ.get("CUDA_VISIBLE_DEVICES")
    if words is None:
        return usable if are_numbered else None
    found: list[Gpu] = []
    for word in map(str.strip, words.split(",")):
        matching: list[Gpu] = []
        if word.isdecimal() and len(word) <= MOST_DIGITS:
            if not are_numbered:
                return None
            matching = usable[int(word) :][:1]
        elif word.startswith(("GPU-", "MIG-GPU-")):
            uuid = word.removeprefix("MIG-").partition("/")[0]
            matching = [gpu for gpu in usable if gpu.uuid.startswith(uuid)]
        elif word.startswith("MIG-"):
            return None  # the newer name of an instance does not say which GPU has it
        if len(matching) != 1:  # CUDA stops at the first word that is not a device
            break
        found += matching
    return found


def _has_mig(root: str) -> bool:
    folder = f"{root}/{DRIVER}/capabilities"
    return any(
        name.startswith("gi")
        for gpu in names_in(folder)
        if gpu.startswith("gpu")
        for name in names_in(f"{folder}/{gpu}/mig")
    )


SWITCH = "HVDLITE_GPU_BINDING"
# set_mempolicy and get_mempolicy, which the C library has no functions for.
SYSTEM_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
DEFAULT, PREFERRED = 0, 1
MOST_NODES = 1024


class Near(NamedTuple):
    """The node of a rank's GPU, with the node's usable hardware threads. The rank is number `place`
    of the `sharers` local ranks whose GPUs are there. is_roomy: whether each local rank gets at its
    GPU's node as many hardware threads as its even share of the host's."""

    address: str
    node: int
    cpus: frozenset[int]
    place: int
    sharers: int
    is_roomy: bool

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
