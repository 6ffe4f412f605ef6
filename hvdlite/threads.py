"""How many threads torch gets in each rank: the cores of a host are divided, not shared."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Who sets one of these has chosen the number of threads.
CHOSEN_BY_USER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT")


@dataclass(frozen=True)
class Cores:
    """What one rank may run on: its affinity mask, and the quota (in cores) of its cgroup.

    Ranks in the same cgroup share its quota.
    """

    mask: frozenset[int]
    cgroup: str = ""
    quota: float | None = None


def threads_for(local: Sequence[Cores], local_rank: int) -> int:
    """The threads of one rank among those of its host, at least 1.

    Ranks whose masks overlap, directly or through others, divide the union of these masks; a rank
    with a mask of its own has all of it.
    """
    own = local[local_rank]
    union = set(own.mask)
    members = {local_rank}
    grown = True
    while grown:
        grown = False
        for rank, cores in enumerate(local):
            if rank not in members and union & cores.mask:
                union |= cores.mask
                members.add(rank)
                grown = True
    share = len(union) // len(members)
    if own.quota is not None:
        sharers = sum(cores.cgroup == own.cgroup for cores in local)
        share = min(share, int(own.quota / sharers))
    return max(1, min(share, len(own.mask)))


def own_cores(root: Path = Path("/")) -> Cores:
    """What this process may run on."""
    cgroup, quota = _tightest_quota(root)
    return Cores(frozenset(os.sched_getaffinity(0)), cgroup, quota)


def chosen_by_user(environ: Mapping[str, str]) -> bool:
    """Whether the user has set the number of threads."""
    return any(environ.get(name) for name in CHOSEN_BY_USER)


def _tightest_quota(root: Path) -> tuple[str, float | None]:
    """The cgroup whose CPU quota binds this process most, and that quota in cores.

    A quota of any ancestor binds too. In a container the path of /proc/self/cgroup may lie outside
    what is mounted; what is mounted is then the container's own.
    """
    best: tuple[str, float | None] = ("", None)
    for mount, path, read in _cpu_cgroups(root):
        for folder in (path, *path.parents):
            quota = read(mount / str(folder).lstrip("/"))
            if quota is not None and (best[1] is None or quota < best[1]):
                best = (f"{mount}{folder}", quota)
    return best


def _cpu_cgroups(root: Path) -> Iterator[tuple[Path, Path, Callable[[Path], float | None]]]:
    """(where it is mounted, the path in it, how its quota is read), of cgroup v2 and of v1."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            yield root / "sys/fs/cgroup", Path(path), _quota_v2
        elif "cpu" in controllers.split(","):
            yield root / "sys/fs/cgroup/cpu", Path(path), _quota_v1


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return None if quota <= 0 else quota / int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
