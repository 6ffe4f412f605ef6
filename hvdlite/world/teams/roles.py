"""Which ranks of a job are servers, and which are workers.

A job with servers (knob `servers`) has two kinds of teams. The world and its process sets consist
of workers, which are numbered anew from 0, in the order of their ranks in the job. `everyone` has
all of them, workers and servers, with their ranks in the job; only `hvdlite.asynchronous` uses it.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdlite.errors import LaunchError
from hvdlite.world.teams.placement import Placement
from hvdlite.world.teams.team import Team


@dataclass(frozen=True)
class Roles:
    """Ranks in the job, ascending. A worker's index is its rank in the world."""

    workers: tuple[int, ...]
    servers: tuple[int, ...]


@dataclass(frozen=True)
class Everyone:
    """Workers and servers, as one of them sees them.

    team: Its ranks are those of the job.
    placement: Where all of them are.
    """

    team: Team
    placement: Placement
    roles: Roles

    @property
    def is_server(self) -> bool:
        return self.team.rank in self.roles.servers

    def host_of(self, rank: int) -> int:
        """The index of a rank's host."""
        return next(i for i, ranks in enumerate(self.placement.hosts) if rank in ranks)

    def name_of(self, rank: int) -> str:
        """A rank of the job, in words."""
        host = self.placement.host_names[self.host_of(rank)]
        if rank in self.roles.servers:
            return f"server {self.roles.servers.index(rank)} (rank {rank} of the job, on {host})"
        return f"worker {self.roles.workers.index(rank)} (on {host})"


def roles_of(placement: Placement, num_servers: int) -> Roles:
    """The servers are the last ranks of the hosts, from the last host backwards, one of each host
    in turn: on one host the last ranks. So they spread over the hosts, and each has as much of its
    host's network as possible.

    Raises:
        LaunchError: No rank is left to be a worker.
    """
    if num_servers >= placement.size:
        raise LaunchError(
            f"HVDLITE_SERVERS={num_servers}, but the job has {placement.size} processes, servers "
            "included: no worker is left; start more processes (hvdrun -np) or fewer servers "
            "(--servers)"
        )
    left = [list(ranks) for ranks in reversed(placement.hosts)]
    servers: list[int] = []
    while len(servers) < num_servers:
        for ranks in left:
            if ranks and len(servers) < num_servers:
                servers.append(ranks.pop())
    workers = [rank for rank in range(placement.size) if rank not in servers]
    return Roles(tuple(workers), tuple(sorted(servers)))
