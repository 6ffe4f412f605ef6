"""Pure: which ranks are on which host, and the numbers that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """The host of every rank, and which of them this rank is.

    hosts: the world ranks on each host, ascending, the hosts in the order of their first rank;
    every rank is in exactly one of them.
    """

    rank: int
    hosts: tuple[tuple[int, ...], ...]
    host_names: tuple[str, ...]

    @property
    def host(self) -> int:
        """The index of this rank's host."""
        return next(i for i, ranks in enumerate(self.hosts) if self.rank in ranks)

    @property
    def size(self) -> int:
        return sum(map(len, self.hosts))

    @property
    def local_ranks(self) -> tuple[int, ...]:
        return self.hosts[self.host]

    @property
    def local_rank(self) -> int:
        return self.local_ranks.index(self.rank)

    @property
    def local_size(self) -> int:
        return len(self.local_ranks)

    @property
    def cross_ranks(self) -> tuple[int, ...]:
        """The ranks with this local rank: one on each host that has enough ranks."""
        local_rank = self.local_rank
        return tuple(ranks[local_rank] for ranks in self.hosts if len(ranks) > local_rank)

    @property
    def cross_rank(self) -> int:
        return self.cross_ranks.index(self.rank)

    @property
    def cross_size(self) -> int:
        return len(self.cross_ranks)

    @property
    def homogeneous(self) -> bool:
        return len(set(map(len, self.hosts))) == 1


def hosts_of(leaders: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each host. leaders: by rank, the lowest rank of its host."""
    hosts: dict[int, list[int]] = {}
    for rank, leader in enumerate(leaders):
        hosts.setdefault(leader, []).append(rank)
    return tuple(map(tuple, hosts.values()))


def pretended_leaders(counts: Sequence[int]) -> list[int]:
    """By rank, the lowest rank of its pretended host. counts: the number of ranks of each host."""
    leaders: list[int] = []
    for count in counts:
        leaders += [len(leaders)] * count
    return leaders
