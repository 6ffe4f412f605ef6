"""A machine's cores, GPUs and memory. Imports little, as agents load it at their start."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hvdrun.machine.cgroups import cgroups, read
from hvdrun.machine.topology import cores, tightest_quota

_BLOCK_BYTES = 4096


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
