"""Which cores of its host each rank gets, and how many threads. Pure but for `here`.

A rank of PyTorch computes with as many threads as it has cores: it gets a share of the host's
cores, not one of them, and no two ranks share a core. docs/design/binding.md says why it is so.
"""

from __future__ import annotations

import os

from hvdrun.machine.environment import THREADS
from hvdrun.machine.topology import Core, are_alike, cores, tightest_quota

# typing costs 10 ms of each start, and collections.abc as much.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Who sets one of these has chosen the number of threads.
CHOSEN_BY_USER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT")

LEVELS = 3  # of Core.location


def divide(cores: Sequence[Core], ranks: int) -> list[list[Core]]:
    """The cores of each local rank; `cores` are in the order of neighbourhood.

    All cores are given out, each to one rank, and no rank gets less than the whole part of
    cores/ranks. Where that can be had without it, no rank's share lies on two sockets, then on two
    NUMA nodes, then on two caches. More ranks than cores share them all: where the kernel moves
    them about, none waits for a core while another one is free.
    """
    if ranks > len(cores):
        return [list(cores)] * ranks
    return _divide(cores, ranks, 0)


def _divide(cores: Sequence[Core], ranks: int, level: int) -> list[list[Core]]:
    if ranks == 1:
        return [list(cores)]
    total = len(cores)
    if level < LEVELS:
        groups: dict[int, list[Core]] = {}
        for core in cores:
            groups.setdefault(core.location[level], []).append(core)
        counts = _deal([len(group) for group in groups.values()], ranks)
        if counts is not None:
            return [
                share
                for group, count in zip(groups.values(), counts, strict=True)
                for share in _divide(group, count, level + 1)
            ]
    return [
        list(cores[rank * total // ranks : (rank + 1) * total // ranks]) for rank in range(ranks)
    ]


def _deal(sizes: Sequence[int], ranks: int) -> list[int] | None:
    """How many ranks go to each group of cores, so that none gets less than its part of them all;
    None where only a share across groups gives that, or leaves no group idle."""
    least = sum(sizes) // ranks
    if sum(size // least for size in sizes) < ranks:
        return None
    counts = [0] * len(sizes)
    for _ in range(ranks):
        open_ = [i for i, size in enumerate(sizes) if counts[i] < size // least]
        roomiest = max(open_, key=lambda i: (sizes[i] / (counts[i] + 1), -i))
        counts[roomiest] += 1
    return counts if all(counts) else None


class CpuShare:
    """Where a rank runs: the hardware threads, None for those that it has anyway, and how many
    threads it should compute with."""

    __slots__ = ("cpus", "threads")

    def __init__(self, cpus: frozenset[int] | None, threads: int) -> None:
        self.cpus = cpus
        self.threads = threads


def cpu_share(
    cores: Sequence[Core], alike: bool, quota: float | None, local_rank: int, local_size: int
) -> CpuShare:
    """Of one rank among those of its host, which all may use these cores, and share the quota.

    Cores of two kinds are not divided: half of the ranks would get the slow ones, and all ranks
    would wait for those.
    """
    threads = len(cores) // local_size
    cpus = None
    if alike and 1 < local_size <= len(cores):
        share = divide(cores, local_size)[local_rank]
        cpus = frozenset().union(*(core.cpus for core in share))
        threads = len(share)
    if quota is not None:
        threads = min(threads, int(quota / local_size))
    return CpuShare(cpus, max(1, threads))


def here(local_rank: int, local_size: int) -> CpuShare:
    """Of a rank of this host; all of them were started with the same cores as this process."""
    usable = os.sched_getaffinity(0)
    return cpu_share(cores(usable), are_alike(usable), tightest_quota()[1], local_rank, local_size)


def chosen_by_user(environ: Mapping[str, str]) -> bool:
    """Whether the user has set the number of threads."""
    return any(environ.get(name) not in (None, "", environ.get(THREADS)) for name in CHOSEN_BY_USER)


def thread_variables(threads: int, environ: Mapping[str, str]) -> dict[str, str]:
    """What OpenMP, MKL and with them torch go by, if the user has not chosen."""
    if chosen_by_user(environ):
        return {}
    return {"OMP_NUM_THREADS": str(threads), THREADS: str(threads)}
