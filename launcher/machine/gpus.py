"""The NVIDIA GPUs of this host as its driver's files show them, without CUDA. Loaded beside each
rank, hence the standard library only, and little of it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hvdrun.machine.cgroups import read

DRIVER = "proc/driver/nvidia"
MOST_DIGITS = 4  # of a device's number


class Gpu:
    """address: on the PCI bus, as in 0000:3b:00.0; minor: N of its /dev/nvidiaN."""

    __slots__ = ("address", "minor", "model", "uuid")

    def __init__(self, address: str, minor: str, model: str, uuid: str) -> None:
        self.address = address
        self.minor = minor
        self.model = model
        self.uuid = uuid


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
