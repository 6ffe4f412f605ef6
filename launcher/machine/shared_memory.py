"""/dev/shm, where MPIs keep the memory that the ranks of a host share. For the agents, hence few
imports."""

from __future__ import annotations

import contextlib
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


class SharedFiles:
    """The files that a rank's MPI has in /dev/shm, and in /tmp: removed if the rank leaves without
    MPI_Finalize, as MPIs remove them only if a rank ends in good order.

    Two ways to know them, so that no file of another job is touched. MPICH derives their names from
    the job's name, which its daemon tells the rank before the rank makes a file: so a rank may die
    as early as it likes. Other MPIs' files are found among those that the rank has mapped, from a
    second after its start.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()

    def look(self, pid: int) -> None:
        """Remembers what the process has mapped: after its end that can't be found out."""
        self.names.update(name for name in names_mapped_by(pid) if name.startswith(OF_MPI))

    def remove(self, job: bytes, topology_file: bytes = b"") -> None:
        """`job`: its name in MPI; `topology_file`: of MPI's daemon (see pmi). Or empty."""
        if topology_file.startswith(b"/"):
            with contextlib.suppress(OSError):
                os.unlink(topology_file)
        if job:
            with contextlib.suppress(OSError):
                self.names.update(
                    name for name in os.listdir(FOLDER) if name.startswith(mpichs_names(job))
                )
        for name in self.names:
            with contextlib.suppress(OSError):
                os.unlink(f"{FOLDER}/{name}")


def mpichs_names(job: bytes) -> tuple[str, str]:
    """How the names of this job's files begin, in MPICH 4 and 5: with FNV-1a of the job's name, in
    32 bits. Then comes the number of the host in the job."""
    number = 2166136261
    for byte in job:
        number = (number ^ byte) * 16777619 & 0xFFFFFFFF
    return f"mpich_shm_{number:x}_", f"mpich_vci_{number:x}_"
