"""Groups: teams of some ranks that only their members make, in any number, also of equal ranks.

Process groups of torch.distributed are groups. They are neither process sets of Horovod's API, nor
numbered by the world: a key tells them apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite.errors import LaunchError
from hvdlite.world import world
from hvdlite.world.bootstrap.host_peers import HostPeers
from hvdlite.world.bootstrap.peers import MpiPeers, Peers
from hvdlite.world.teams.placement import part_of
from hvdlite.world.teams.team import Team, make_team, team_of_one


def make_group(ranks: Sequence[int], key: str, timeout_s: float) -> Team:
    """A team of these world ranks, with an engine of its own. Collective over them; blocks.

    ranks: in the group's order: a member's index is its rank in the team.
    key: the same on all members; each creation of a group needs another one.
    timeout_s: how long it waits for the other members. Under MPI it waits for ever, as MPI does.

    Raises:
        NotInitializedError: (a ValueError) there is no world.
        ValueError: The ranks are not distinct ranks of the world, this one among them.
        LaunchError: A member did not come in time, or has ended; or there is too little memory, or
            MPI has no room for a communicator.
    """
    active = world.current()
    members = tuple(int(rank) for rank in ranks)
    if len(set(members)) != len(members) or not all(0 <= r < active.size for r in members):
        raise ValueError(
            f"a group of ranks {list(members)}: expected distinct ranks below {active.size}"
        )
    if active.rank not in members:
        raise ValueError(f"a group of ranks {list(members)} lacks this rank, {active.rank}")
    placement = part_of(active.placement, members)
    if len(members) == 1:
        team = team_of_one(active.config, placement, active.rank)
        team.label = key
    else:
        assert active.team.peers is not None
        assert active.table is not None
        peers = _peers_of(active.team.peers, members, key, timeout_s)
        try:
            _check(peers, len(placement.hosts))
            team = make_team(active.config, active.table, peers, placement, members, key)
        except BaseException:
            peers.retire(key)
            raise
        if isinstance(peers, HostPeers):
            peers.free()  # the engine has its memory: the sockets serve no more
    active.groups.append(team)
    active.on_teams_changed()
    return team


def close_group(team: Team) -> None:
    """Leaves a group: its pending operations fail, and those of other members that need this one.

    Not collective, and works for a group that is broken. A second call does nothing. A world that
    no `init` but only groups have needed ends with the last of them.
    """
    team.close()
    active = world.active
    if active is None or team not in active.groups:
        return
    active.groups.remove(team)
    active.on_teams_changed()
    team.retire()
    if not active.groups and not active.used_by_api:
        world.shutdown()


def _peers_of(peers: Peers, members: Sequence[int], key: str, timeout_s: float) -> Peers:
    if isinstance(peers, HostPeers):
        return peers.part(members, key, timeout_s)
    part = peers.part(members, key)
    if isinstance(part, MpiPeers):
        part.free_common()
    return part


def _check(peers: Peers, num_hosts: int) -> None:
    if num_hosts > 1 and not peers.any_thread:
        # Only the engine in which a thread waits makes progress.
        raise LaunchError(
            f"{peers.version()} lets only one thread at a time call it, so a group on several "
            "hosts can't be used beside others; start MPI with MPI_THREAD_MULTIPLE"
        )
