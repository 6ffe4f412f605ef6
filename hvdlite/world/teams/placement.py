"""Which ranks are on which host, and the numbers that follow from it."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hvdlite.errors import ConfigError, LaunchError

if TYPE_CHECKING:
    from hvdlite.world.bootstrap.peers import Peers


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


def own_host_name() -> str:
    """This host's name, fit to be printed: the kernel takes any bytes for one."""
    name = os.fsencode(socket.gethostname()).decode(errors="replace")
    return "".join(char if char.isprintable() else "?" for char in name)


def _boot_id() -> str:
    """The same for all processes of a machine; "" if the kernel does not say it."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read()
    except OSError:
        return ""


def _check_hosts(
    hosts: Sequence[Sequence[int]], boot_ids: Sequence[str], names: Sequence[str]
) -> None:
    """Raises LaunchError, on every rank, if MPI takes ranks on two machines for ranks of one host:
    they would wait for ever in memory that they do not share."""
    for ranks in hosts:
        first = ranks[0]
        for rank in ranks:
            if boot_ids[rank] and boot_ids[first] and boot_ids[rank] != boot_ids[first]:
                raise LaunchError(
                    f"init: MPI takes rank {first} on {names[first]} and rank {rank} on "
                    f"{names[rank]} for ranks of one host, but these are two machines; give each "
                    "host a name of its own (`hostname`) that differs from the others' before the "
                    "first dot, or start the job with hvdrun"
                )


def placement_of(peers: Peers, host_ranks: Sequence[int]) -> Placement:
    """Which ranks are on which host: those that can share memory are one host. Collective.

    host_ranks: pretended hosts, for tests; empty: the real ones.

    Raises:
        LaunchError: MPI takes two machines for one host; on every rank.
        ConfigError: The sum of host_ranks is not the number of ranks, or there is no MPI to send
            messages between pretended hosts; on every rank.
    """
    if host_ranks:
        if sum(host_ranks) != peers.size:
            raise ConfigError(
                f"HVDLITE_HOST_RANKS adds up to {sum(host_ranks)}, but the world's size is "
                f"{peers.size}"
            )
        if peers.comm is None and len(host_ranks) > 1:
            raise ConfigError("HVDLITE_HOST_RANKS: several hosts need MPI; start with hvdrun")
        leaders = pretended_leaders(host_ranks)
        names = [f"host{leader}" for leader in leaders]
    else:
        leaders = peers.allgather(peers.host_leader())
        facts = peers.allgather((own_host_name(), _boot_id()))
        names = [name for name, _ in facts]
        _check_hosts(hosts_of(leaders), [boot_id for _, boot_id in facts], names)
    hosts = hosts_of(leaders)
    return Placement(peers.rank, hosts, tuple(names[ranks[0]] for ranks in hosts))


def part_of(placement: Placement, ranks: Sequence[int]) -> Placement:
    """Where some of the ranks are, this one among them, by their index in `ranks`."""
    hosts = []
    for host, name in zip(placement.hosts, placement.host_names, strict=True):
        members = tuple(index for index, rank in enumerate(ranks) if rank in host)
        if members:
            hosts.append((members, name))
    hosts.sort()
    return Placement(
        list(ranks).index(placement.rank),
        tuple(members for members, _ in hosts),
        tuple(name for _, name in hosts),
    )
