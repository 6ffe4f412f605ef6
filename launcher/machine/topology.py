"""The cores of this host, which of them are neighbours, and a container's CPU quota.

Each host reads them itself, from /sys and the cgroups, as the hosts of a job may differ. Loaded
beside each rank, hence the standard library only, and little of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from hvdrun.machine.cgroups import cgroups, read

CPUS = "sys/devices/system/cpu"
NODES = "sys/devices/system/node"


class Core:
    """A physical core: its usable hardware threads, and its location."""

    __slots__ = ("cpus", "location")

    def __init__(self, cpus: frozenset[int], location: tuple[int, int, int]) -> None:
        self.cpus = cpus
        self.location = location  # socket, NUMA node, shared cache

    def __repr__(self) -> str:
        return f"Core({sorted(self.cpus)}, {self.location})"


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
