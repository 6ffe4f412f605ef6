"""How many threads torch uses in each rank: the ranks of a host divide its cores."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from hvdrun.for_hvdlite import chosen_by_user, cores, tightest_quota

__all__ = ["Cores", "chosen_by_user", "cpus_per_rank", "own_cores", "threads_for"]


@dataclass(frozen=True)
class Cores:
    """The cores that one rank may use: its affinity mask; the physical cores in the mask, each
    named by the number of one of its hardware threads; and the quota of its cgroup, in cores.

    Ranks in the same cgroup share its quota.
    """

    mask: frozenset[int]
    physical: frozenset[int]
    cgroup: str = ""
    quota: float | None = None


def threads_for(local: Sequence[Cores], local_rank: int) -> int:
    """The threads of one rank among those of its host, at least 1.

    Ranks that share cores, directly or through others, divide the union of their cores; a rank that
    shares none gets all of its own.
    """
    own = local[local_rank]
    members = _sharers([cores.physical for cores in local], local_rank)
    union = frozenset().union(*(local[rank].physical for rank in members))
    share = len(union) // len(members)
    if own.quota is not None:
        sharers = sum(cores.cgroup == own.cgroup for cores in local)
        share = min(share, int(own.quota / sharers))
    return max(1, min(share, len(own.physical)))


def cpus_per_rank(local: Sequence[Cores], local_rank: int) -> float:
    """Hardware threads per rank, over this rank and all ranks that share some with it."""
    members = _sharers([cores.mask for cores in local], local_rank)
    return len(frozenset().union(*(local[rank].mask for rank in members))) / len(members)


def _sharers(sets: Sequence[frozenset[int]], start: int) -> set[int]:
    """The sets that overlap with set `start`, directly or through others, and `start` itself."""
    union = set(sets[start])
    members = {start}
    grown = True
    while grown:
        grown = False
        for number, numbers in enumerate(sets):
            if number not in members and union & numbers:
                union |= numbers
                members.add(number)
                grown = True
    return members


def own_cores(root: str = "/") -> Cores:
    """The cores that this process may use."""
    mask = frozenset(os.sched_getaffinity(0))
    cgroup, quota = tightest_quota(root)
    return Cores(mask, frozenset(min(core.cpus) for core in cores(mask, root)), cgroup, quota)
