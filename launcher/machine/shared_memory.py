"""/dev/shm, where MPIs keep the memory that the ranks of a host share. For the agents, hence few
imports."""

from __future__ import annotations

import os
from typing import Any

FOLDER = "/dev/shm"
# MPIs' files begin so. MPIs remove them only if a rank ends in good order.
OF_MPI = (
    *("mpich_shm_", "mpich_vci_", "sm_segment.", "vader_segment.", "Intel_MPI_", "psm2_shm"),
    "ucx_shm",
)
# With less than this or a quarter of it free, it counts as full: what a dead rank had mapped
# without a name is free again before anyone can look.
FULL_BYTES = 8 << 20


def space() -> tuple[int, int]:
    """The number of bytes that are free in /dev/shm, and its size; 0, 0 if there is none."""
    try:
        status = os.statvfs(FOLDER)
    except OSError:
        return 0, 0
    return status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize


def is_full(free_bytes: int, size_bytes: int) -> bool:
    return free_bytes < min(FULL_BYTES, size_bytes // 4)


def what_is_full() -> str:
    """'used/size' in bytes if /dev/shm is full, else an empty text."""
    free_bytes, size_bytes = space()
    return f"{size_bytes - free_bytes}/{size_bytes}" if is_full(free_bytes, size_bytes) else ""


def facts() -> dict[str, Any]:
    """Plain values: the fields of `host_facts.SharedMemory`."""
    free_bytes, size_bytes = space()
    left = leftovers()
    return {
        "free_bytes": free_bytes,
        "size_bytes": size_bytes,
        "leftovers": sorted(left),
        "leftover_bytes": sum(left.values()),
    }


def leftovers() -> dict[str, int]:
    """This user's files of MPI that no process has open or mapped, with the bytes that they take:
    those of jobs that were killed. A process in another container may still use one."""
    found: dict[str, int] = {}
    try:
        names = [name for name in os.listdir(FOLDER) if name.startswith(OF_MPI)]
    except OSError:
        return found
    for name in names:
        try:
            status = os.stat(f"{FOLDER}/{name}", follow_symlinks=False)
        except OSError:
            continue
        if status.st_uid == os.geteuid():
            found[name] = status.st_blocks * 512
    if found:
        for name in _in_use():
            found.pop(name, None)
    return found


def _in_use() -> set[str]:
    """The names of the files in /dev/shm that some process of this user has mapped or open."""
    used: set[str] = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        used |= names_mapped_by(pid)
        try:
            for number in os.listdir(f"/proc/{pid}/fd"):
                folder, _, name = os.readlink(f"/proc/{pid}/fd/{number}").rpartition("/")
                if folder == FOLDER:
                    used.add(name)
        except OSError:  # it has ended, or is another user's
            continue
    return used


def names_mapped_by(pid: int | str) -> set[str]:
    """The names of the files in /dev/shm that the process has mapped."""
    names = set()
    try:
        with open(f"/proc/{pid}/maps", "rb") as maps:
            for line in maps:
                path = line[line.find(b"/") :].rstrip().decode(errors="surrogateescape")
                folder, _, name = path.rpartition("/")
                if folder == FOLDER:
                    names.add(name)
    except OSError:
        pass
    return names
