"""A machine's cores and which of them are neighbours, a container's CPU quota, GPUs, and memory.

Each host reads them itself, from /sys, /proc and the cgroups, as the hosts of a job may differ.
Loaded beside each rank, hence little of the standard library.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from hvdrun.machine.limits import cgroups, read

_BLOCK_BYTES = 4096
CPUS = "sys/devices/system/cpu"
NODES = "sys/devices/system/node"


class Core(NamedTuple):
    """A physical core: its usable hardware threads, and its location."""

    cpus: frozenset[int]
    location: tuple[int, int, int]  # socket, NUMA node, shared cache


def cores(cpus: Iterable[int], root: str = "/") -> list[Core]:
    """The cores of these hardware threads, with neighbours side by side."""
    usable = frozenset(cpus)
    nodes = _numa_nodes(root)
    caches: dict[int, int] = {}
    found = []
    seen: set[int] = set()
    for cpu in sorted(usable):
        if cpu in seen:
            continue
        folder = f"{root}/{CPUS}/cpu{cpu}"
        siblings = (parse_list(read(f"{folder}/topology/thread_siblings_list")) & usable) | {cpu}
        seen |= siblings
        if cpu not in caches:
            sharing = parse_list(read(f"{folder}/cache/index3/shared_cpu_list"))
            caches.update(dict.fromkeys(sharing, min(sharing, default=0)))
        socket = _number(read(f"{folder}/topology/physical_package_id"))
        found.append(Core(siblings, (socket, nodes.get(cpu, 0), caches.get(cpu, 0))))
    return sorted(found, key=lambda core: (core.location, min(core.cpus)))


def are_alike(cpus: Iterable[int], root: str = "/") -> bool:
    """Whether the kernel says that all of them are equally fast: some laptops and phones have cores
    of two kinds."""
    usable = frozenset(cpus)
    slow = parse_list(read(f"{root}/sys/devices/cpu_atom/cpus"))
    return not (slow & usable and usable - slow) and (
        len({read(f"{root}/{CPUS}/cpu{cpu}/cpu_capacity") for cpu in usable}) < 2
    )


def _numa_nodes(root: str) -> dict[int, int]:
    nodes: dict[int, int] = {}
    try:
        names = os.listdir(f"{root}/{NODES}")
    except OSError:
        return nodes
    for name in names:
        if name.startswith("node") and name[4:].isdigit():
            cpus = parse_list(read(f"{root}/{NODES}/{name}/cpulist"))
            nodes.update(dict.fromkeys(cpus, int(name[4:])))
    return nodes


def parse_list(text: str) -> frozenset[int]:
    """Numbers in the kernel's notation: '0-3,8'."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit():
            numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0


def tightest_quota(root: str = "/") -> tuple[str, float | None]:
    """The cgroup with the lowest CPU quota for this process, and that quota in cores."""
    best: tuple[str, float | None] = ("", None)
    for folder, is_version_2 in cgroups("cpu", root):
        quota = _quota_v2(folder) if is_version_2 else _quota_v1(folder)
        if quota is not None and (best[1] is None or quota < best[1]):
            best = (folder, quota)
    return best


def _quota_v2(folder: str) -> float | None:
    quota, _, period = read(f"{folder}/cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _quota_v1(folder: str) -> float | None:
    quota = _number(read(f"{folder}/cpu.cfs_quota_us"))  # -1: none
    period = _number(read(f"{folder}/cpu.cfs_period_us"))
    return quota / period if quota and period else None


def physical_cores(root: str = "/") -> int:
    """The number of cores for this process: hyper-threads of one core count once, and a
    container has no more cores than its quota allows."""
    count = len(cores(os.sched_getaffinity(0), root))
    quota = tightest_quota(root)[1]
    return count if quota is None else max(1, min(count, int(quota)))


def gpu_count(visible: str | None, root: str = "/") -> int:
    """The number of NVIDIA devices that the driver lists and CUDA_VISIBLE_DEVICES leaves."""
    devices = _entries(f"{root}/proc/driver/nvidia/gpus")
    if not devices:
        names = _entries(f"{root}/dev")
        devices = [n for n in names if n.startswith("nvidia") and n[6:].isdigit()]
    if visible is None or not devices:
        return len(devices)
    count = 0
    for word in map(str.strip, visible.split(",")):
        # CUDA stops at the first word that is not a device. Only the driver knows the valid names.
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
    """The memory that processes can still get; None: unknown."""
    known = [n for n in (available_bytes(root), left_in_cgroup_bytes(root)) if n is not None]
    return min(known, default=None)


def available_bytes(root: str = "/") -> int | None:
    """The same of the whole machine."""
    return _numbers(f"{root}/proc/meminfo", 1024).get("MemAvailable:")


def left_in_cgroup_bytes(root: str = "/") -> int | None:
    """The memory that the tightest memory cgroup leaves, a container's or a scheduler's job's;
    None: there is no limit. Cached files count as free, as the kernel can drop them."""
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
    """The values of a kernel file with a name and a number in each line."""
    lines = [line.split() for line in read(path).splitlines()]
    return {words[0]: int(words[1]) * unit for words in lines if len(words) > 1}


def temporary_path(environ: Mapping[str, str]) -> tuple[str, str]:
    """The variable that names the folder for temporary files, and the folder, as Open MPI looks for
    it."""
    for name in ("TMPDIR", "TEMP", "TMP"):
        if environ.get(name):
            return name, environ[name]
    return "", "/tmp"


def temporary_folder(environ: Mapping[str, str]) -> dict[str, object]:
    """The folder for temporary files and its free space; fields as in
    `host_facts.Temporary`. Makes a folder and a file there, and removes them: quotas and read-only
    file systems show only then."""
    path = temporary_path(environ)[1]
    made = f"{path}/.hvdrun-{os.getpid()}-{os.urandom(8).hex()}"
    problem = ""
    free_bytes = free_files = None
    try:
        os.mkdir(made, 0o700)
        try:
            _write(f"{made}/test")
        finally:
            os.rmdir(made)
        status = os.statvfs(path)
        free_bytes = status.f_bavail * status.f_frsize
        free_files = status.f_favail if status.f_files else None  # some file systems have no limit
    except OSError as error:
        problem = error.strerror or str(error)
    return {"path": path, "problem": problem, "free_bytes": free_bytes, "free_files": free_files}


def _write(path: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(fd, bytes(_BLOCK_BYTES))
    finally:
        os.close(fd)
        os.unlink(path)
