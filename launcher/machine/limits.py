"""The limits of a process: its cgroups, and how many processes and open files it may still have.
Loaded beside each rank, hence few imports."""

from __future__ import annotations

import errno
import os
import resource
import time
from collections.abc import Iterator

# What the system says when a limit is reached; for another reason, nothing here does.
LACKING = frozenset((errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM))
# A limit on the user's processes above this is not looked at: to count them means to read /proc.
COUNTED_UP_TO = 10_000


def cgroups(
    controller: str, root: str = "/", process: int | str = "self"
) -> Iterator[tuple[str, bool]]:
    """The folders of the cgroups that limit that process, and whether each is of version 2.

    The limits of all ancestors apply too. In a container the path in /proc/self/cgroup may not be
    mounted; then the mounted folder is the container's own cgroup.
    """
    for line in read(f"{root}/proc/{process}/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            mount = f"{root}/sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = f"{root}/sys/fs/cgroup/{controller}"
        else:
            continue
        while path.strip("/"):
            yield mount + path, number == "0"
            path = path.rpartition("/")[0]
        yield mount, number == "0"


def throttling(
    process: int | str = "self", root: str = "/"
) -> dict[str, tuple[int, int, float | None, float]]:
    """By cgroup that limits the CPU time of that process: how many periods of its quota there have
    been, in how many of them it was used up, so that the kernel stopped its processes, how many
    seconds of CPU time all of these have used (None: not known), and when that was, by the clock
    `time.monotonic`."""
    found = {}
    for folder, is_version_2 in cgroups("cpu", root, process):
        pairs = [line.split() for line in read(f"{folder}/cpu.stat").splitlines()]
        counts = {pair[0]: pair[1] for pair in pairs if len(pair) == 2}
        periods, stopped = counts.get("nr_periods", ""), counts.get("nr_throttled", "")
        if periods.isdecimal() and stopped.isdecimal():
            if is_version_2:
                used, per_s = counts.get("usage_usec", ""), 1e6
            else:
                used, per_s = _used_ns(folder, process, root), 1e9
            used_s = int(used) / per_s if used.isdecimal() else None
            found[folder] = int(periods), int(stopped), used_s, time.monotonic()
    return found


def _used_ns(folder: str, process: int | str, root: str) -> str:
    """Of a cgroup of version 1. Its counter lies in the same folder where both controllers are
    mounted together, as they mostly are, else in the one of the same name."""
    if used := read(f"{folder}/cpuacct.usage"):
        return used
    mount = f"{root}/sys/fs/cgroup/cpu"
    same = f"{root}/sys/fs/cgroup/cpuacct{folder[len(mount) :]}"
    # The two trees need not be alike: the process may be in other groups there.
    folders = (each for each, is_version_2 in cgroups("cpuacct", root, process) if not is_version_2)
    return read(f"{same}/cpuacct.usage") if same in folders else ""


def read(path: str) -> str:
    """The file's text, or "": containers and virtual machines hide some files."""
    try:
        with open(path, errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


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
