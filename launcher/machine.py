"""What a machine has, found without importing what would slow an agent's start."""

from __future__ import annotations

import glob
import os

from .topology import cores


def physical_cores() -> int:
    """Of those that this process may use: hyper-threads of one core count once."""
    return len(cores(os.sched_getaffinity(0)))


def gpu_count(visible: str | None) -> int:
    """NVIDIA's devices, by what the driver says and CUDA_VISIBLE_DEVICES leaves of them."""
    devices = glob.glob("/proc/driver/nvidia/gpus/*") or glob.glob("/dev/nvidia[0-9]*")
    if visible is None or not devices:
        return len(devices)
    chosen = [part for part in visible.split(",") if part.strip()]
    return 0 if chosen == ["-1"] else len(chosen)


def free_memory_bytes() -> int | None:
    """What processes may still take: of the machine, or of a container's limit."""
    free = None
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    free = int(line.split()[1]) * 1024
        with open("/sys/fs/cgroup/memory.max") as limit:
            left = int(limit.read())
        with open("/sys/fs/cgroup/memory.current") as used:
            left -= int(used.read())
        return max(0, left if free is None else min(free, left))
    except (OSError, ValueError):  # no container, or one without a limit
        return free


def free_shared_memory_bytes() -> int | None:
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return None
    return status.f_bavail * status.f_frsize
