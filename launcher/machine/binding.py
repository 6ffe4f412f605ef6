"""Decides which cores of its host each rank gets, and how many threads. Pure except for `here`.

A rank of PyTorch computes with as many threads as it has cores: so it gets a share of the host's
cores, not one core, and no two ranks share a core. docs/design/binding.md gives the reasons.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hvdrun.machine.environment import THREADS
from hvdrun.machine.gpus import Near, near_gpu
from hvdrun.machine.resources import Core, are_alike, cores, tightest_quota

# A user who sets one of these has chosen the number of threads.
CHOSEN_BY_USER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_THREAD_LIMIT")

LEVELS = 3  # of Core.location


def divide(cores: Sequence[Core], ranks: int) -> list[list[Core]]:
    """The cores of each local rank; neighbours are side by side in `cores`.

    Each core goes to one rank, and no rank gets fewer than floor(cores/ranks). Where that is
    possible, no rank's share spans two sockets, then two NUMA nodes, then two caches. If there are
    more ranks than cores, all ranks share all cores: the kernel moves them about, and none waits
    for a core while another one is free.
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
    """How many ranks go to each group of cores, so that each rank gets at least floor(cores/ranks);
    None if that needs a share that spans groups, or would leave a group idle."""
    least = sum(sizes) // ranks
    if sum(size // least for size in sizes) < ranks:
        return None
    counts = [0] * len(sizes)
    for _ in range(ranks):
        open_ = [i for i, size in enumerate(sizes) if counts[i] < size // least]
        roomiest = max(open_, key=lambda i: (sizes[i] / (counts[i] + 1), -i))
        counts[roomiest] += 1
    return counts if all(counts) else None


class CpuShare(NamedTuple):
    """The hardware threads of a rank (None: those that it has already), the number of threads it
    should compute with, and the NUMA node of its GPU, if its hardware threads are there."""

    cpus: frozenset[int] | None
    threads: int
    near: Near | None = None


def cpu_share(
    cores: Sequence[Core], alike: bool, quota: float | None, local_rank: int, local_size: int
) -> CpuShare:
    """The share of one local rank. All ranks of the host may use these cores, and share the quota.

    Cores of two kinds are not divided: half of the ranks would get the slow ones, and all others
    would wait for them.
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


def here(local_rank: int, local_size: int, environ: Mapping[str, str], root: str = "/") -> CpuShare:
    """The share of a rank of this host; all its ranks start with the same cores as this process.
    environ: the rank's variables.

    Ranks are bound near their GPUs only if none then gets fewer hardware threads than the least
    that a rank gets without. It is all of them or none, so that no two shares overlap.
    """
    usable = frozenset(os.sched_getaffinity(0))
    quota = tightest_quota(root)[1]
    share = cpu_share(cores(usable, root), are_alike(usable, root), quota, local_rank, local_size)
    near = near_gpu(environ, local_rank, local_size, usable, root)
    if near is None:
        return share
    if share.cpus is None or not near.is_roomy:
        if share.cpus is not None and share.cpus <= near.cpus:
            return share._replace(near=near)  # for its memory
        return share
    if quota is not None:
        quota = quota * near.sharers / local_size
    there = cpu_share(
        cores(near.cpus, root), are_alike(near.cpus, root), quota, near.place, near.sharers
    )
    return CpuShare(there.cpus or near.cpus, there.threads, near)


def chosen_by_user(environ: Mapping[str, str]) -> bool:
    """Whether the user has set the number of threads."""
    return any(environ.get(name) not in (None, "", environ.get(THREADS)) for name in CHOSEN_BY_USER)


def thread_variables(threads: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables by which OpenMP, MKL and torch choose threads; none if the user has chosen."""
    if chosen_by_user(environ):
        return {}
    return {"OMP_NUM_THREADS": str(threads), THREADS: str(threads)}
