"""How many processes and open files this process may still have. For the agents too, hence few
imports."""

from __future__ import annotations

import errno
import os
import resource

from hvdrun.machine.cgroups import cgroups, read

# What the system says when a limit is reached; for another reason, nothing here does.
LACKING = frozenset((errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM))
# A limit on the user's processes above this is not looked at: to count them means to read /proc.
COUNTED_UP_TO = 10_000


def open_files() -> tuple[int, int]:
    """The soft limit and the hard one; -1: none."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def raise_open_files(wanted: int) -> int | None:
    """Raises the soft limit to that, or as far as the hard limit goes. The limit as it was before,
    or None if it stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY in (soft, hard):
        return None
    new = min(wanted, hard)
    if new <= soft:
        return None
    resource.setrlimit(resource.RLIMIT_NOFILE, (new, hard))
    return soft


def set_open_files(soft: int) -> None:
    """Sets the soft limit, as far as the hard limit goes."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, hard), hard))


def room_for_processes(root: str = "/") -> tuple[int, str] | None:
    """How many more processes and threads the tightest limit allows, and that limit in words; None
    if there is none."""
    known = [*_room_in_cgroups(root), *_room_of_user(root)]
    return min(known, default=None)


def refused_processes(root: str = "/") -> int:
    """How many processes and threads the cgroups of this process have refused so far."""
    count = 0
    for folder, _ in cgroups("pids", root):
        kind, _, number = read(f"{folder}/pids.events").partition(" ")
        count += int(number) if kind == "max" and number.isdigit() else 0
    return count


def _room_in_cgroups(root: str) -> list[tuple[int, str]]:
    known = []
    for folder, _ in cgroups("pids", root):
        most, used = read(f"{folder}/pids.max"), read(f"{folder}/pids.current")
        if most.isdigit() and used.isdigit():
            left = max(0, int(most) - int(used))
            name = f"{folder}/pids.max".replace("//", "/")
            known.append((left, f"{name} is {most}, of which {used} are in use"))
    return known


def _room_of_user(root: str) -> list[tuple[int, str]]:
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if os.geteuid() == 0 or not 0 <= most <= COUNTED_UP_TO:  # root has no such limit
        return []
    used = sum(_threads(f"{root}/proc/{pid}") for pid in os.listdir(f"{root}/proc"))
    return [(max(0, most - used), f"ulimit -u is {most}, of which {used} are in use")]


def _threads(folder: str) -> int:
    """The number of threads, if the process belongs to this user."""
    is_own = folder.endswith(f"/proc/{os.getpid()}")  # it may look like root's: see `hide_memory`
    try:
        if is_own or os.stat(folder).st_uid == os.geteuid():
            return len(os.listdir(f"{folder}/task"))
    except OSError:
        pass
    return 0
