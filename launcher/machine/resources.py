"""What a machine has, found without importing what would slow an agent's start."""

from __future__ import annotations

import os

from hvdrun.machine.cgroups import cgroups, read
from hvdrun.machine.topology import cores, tightest_quota


def physical_cores(root: str = "/") -> int:
    """Of those that this process may use: hyper-threads of one core count once, and a container's
    quota is as many cores as it pays for."""
    count = len(cores(os.sched_getaffinity(0), root))
    quota = tightest_quota(root)[1]
    return count if quota is None else max(1, min(count, int(quota)))


def gpu_count(visible: str | None, root: str = "/") -> int:
    """NVIDIA's devices, by what the driver says and CUDA_VISIBLE_DEVICES leaves of them."""
    devices = _entries(f"{root}/proc/driver/nvidia/gpus")
    if not devices:
        names = _entries(f"{root}/dev")
        devices = [n for n in names if n.startswith("nvidia") and n[6:].isdigit()]
    if visible is None or not devices:
        return len(devices)
    count = 0
    for word in map(str.strip, visible.split(",")):
        # CUDA stops at the first that is no device. Which names are, only the driver knows.
        is_one = int(word) < len(devices) if word.isdecimal() else word.startswith(("GPU-", "MIG-"))
        if not is_one:
            break
        count += 1
    return count


def _entries(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def free_memory_bytes(root: str = "/") -> int | None:
    """What processes may still take; None: unknown."""
    known = [n for n in (available_bytes(root), left_in_cgroup_bytes(root)) if n is not None]
    return min(known, default=None)


def available_bytes(root: str = "/") -> int | None:
    """Of this machine's memory."""
    return _numbers(f"{root}/proc/meminfo", 1024).get("MemAvailable:")


def left_in_cgroup_bytes(root: str = "/") -> int | None:
    """What the tightest memory cgroup leaves, of a container or a scheduler's job; None: there is
    no limit. What it has cached of files is given up for others, and counts as free."""
    left = []
    for folder, is_version_2 in cgroups("memory", root):
        names = ("max", "current") if is_version_2 else ("limit_in_bytes", "usage_in_bytes")
        limit, used = (read(f"{folder}/memory.{name}") for name in names)
        if limit.isdigit() and used.isdigit():
            statistics = _numbers(f"{folder}/memory.stat")
            total = "" if is_version_2 else "total_"
            cached = sum(
                statistics.get(f"{total}{kind}_file", 0) for kind in ("active", "inactive")
            )
            left.append(max(0, int(limit) - int(used) + cached))
    return min(left, default=None)


def _numbers(path: str, unit: int = 1) -> dict[str, int]:
    """Of a file of the kernel's with a name and a number in each line."""
    lines = [line.split() for line in read(path).splitlines()]
    return {words[0]: int(words[1]) * unit for words in lines if len(words) > 1}


def free_shared_memory_bytes() -> int | None:
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return None
    return status.f_bavail * status.f_frsize
