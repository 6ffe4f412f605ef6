"""The cgroups of a process. Loaded beside each rank, hence without other modules."""

from __future__ import annotations

import time
from collections.abc import Iterator


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
