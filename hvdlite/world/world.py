"""The world of this process: what it consists of, its ranks, and leaving it.

A process has at most one world at a time. `active` is None before `init` and after `shutdown`.
`hvdlite.world.starting` makes it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from hvdlite import _core
from hvdlite.errors import NotInitializedError
from hvdlite.world.bootstrap import mpi
from hvdlite.world.config import Config
from hvdlite.world.teams import sent_bytes
from hvdlite.world.teams.algorithm_table import AlgorithmTable
from hvdlite.world.teams.placement import Placement
from hvdlite.world.teams.process_sets import ProcessSet, global_process_set
from hvdlite.world.teams.roles import Everyone
from hvdlite.world.teams.team import Team
from hvdlite.world.telling import logs


class HasTeam(Protocol):
    """What the world needs of the channel of asynchronous training between hosts
    (`hvdlite.asynchronous.channel`), which is made above this room."""

    @property
    def team(self) -> Team: ...


class AsyncWorker(Protocol):
    """What the world keeps of an asynchronous optimizer (`hvdlite.asynchronous`)."""

    # How many steps this worker has made.
    clock: int

    def stop_counting(self) -> None:
        """This worker joins: nobody waits for its steps any more."""

    def resume(self, clock: int) -> None:
        """All have joined: this worker counts again, with so many steps."""


class World:
    """What `init` makes: the placement of this rank, and the team of all ranks."""

    def __init__(
        self,
        placement: Placement,
        team: Team,
        config: Config,
        mpi_runtime: mpi.MpiRuntime | None,
        table: AlgorithmTable | None = None,
        cpus_per_rank: float = 1.0,
        everyone: Everyone | None = None,
    ) -> None:
        self.placement = placement
        self.team = team
        self.config = config
        self.mpi_runtime = mpi_runtime
        # The algorithms between hosts; None in a world of one.
        self.table = table
        # Hardware threads of this host per rank, if all its ranks may use as many as this one.
        self.cpus_per_rank = cpus_per_rank
        # In a job with servers: workers and servers. A server has no other team.
        self.everyone = everyone
        # All workers again, where they train asynchronously on several hosts without servers.
        self.between_hosts: HasTeam | None = None
        self.rank = placement.rank
        self.size = placement.size
        # The registered process sets, by number; 0 is the global one.
        self.process_sets: dict[int, ProcessSet] = {}
        # The number of the next set to register; the same on all ranks.
        self.next_process_set = 1
        # The groups of this rank, see `groups`.
        self.groups: list[Team] = []
        # The number of the next asynchronous optimizer; the same on all workers.
        self.next_async_optimizer = 0
        # By their numbers, those that this worker still has.
        self.async_workers: dict[int, AsyncWorker] = {}
        # Whether the user has called `hvdlite.init`, and not only made a process group.
        self.used_by_api = False
        # Whether a distributed optimizer has made a step that HVDLITE_CHECK_PARAMETERS counts.
        self.had_reduced_step = False
        # Called when this rank leaves the world, while the engines still work.
        self.before_leaving: list[Callable[[], None]] = []
        # Called by `join`, before it posts anything, and after all ranks have joined.
        self.before_joining: list[Callable[[], None]] = []
        self.after_joining: list[Callable[[], None]] = []
        # Called when a team is added or removed.
        self.teams_changed: list[Callable[[], None]] = []

    def teams(self) -> list[Team]:
        """The teams of all process sets and groups that this process is a member of, in an order
        that all ranks share."""
        sets = [s.team for s in self.process_sets.values() if s.team is not None]
        return [*sets, *sorted(self.groups, key=lambda team: team.label)]

    def all_teams(self) -> list[Team]:
        """`teams`, and those of asynchronous training."""
        teams = self.teams()
        if self.between_hosts is not None:
            teams.insert(0, self.between_hosts.team)
        if self.everyone is not None and not self.everyone.is_server:
            teams.insert(0, self.everyone.team)
        return teams

    @property
    def is_server(self) -> bool:
        return self.everyone is not None and self.everyone.is_server

    def on_teams_changed(self) -> None:
        """A team was added or removed. When the process ends, it leaves all teams in good order:
        the same order on every rank, the world last."""
        has_others = self.size > 1 or self.everyone is not None
        if has_others and (self.mpi_runtime is None or self.mpi_runtime.finalize):
            _core.close_on_exit(tuple(team.engine for team in reversed(self.all_teams())))
        sent_bytes.count(self.teams(), self.placement.hosts)
        for tell in self.teams_changed:
            tell()


active: World | None = None
# This process has left a world with servers: they have ended, so that world can't be made again.
servers_have_ended = False


def current() -> World:
    """The world.

    Raises:
        NotInitializedError: (a ValueError) before `init` and after `shutdown`.
    """
    if active is None:
        raise NotInitializedError
    return active


def enter(world: World) -> None:
    """Makes it the world of this process, which has none."""
    global active
    active = world
    global_process_set.register(0, world.team.ranks, world.team)
    world.process_sets[0] = global_process_set
    world.on_teams_changed()
    logs.describe(world)


def shutdown() -> None:
    """Leaves the world. Not collective, and does not wait for any rank.

    This rank's pending operations fail. Other ranks' operations that need this rank fail there,
    with an error that it has left. `init` works again afterwards if all ranks call it, but not in a
    job with servers, which end. Runs by itself when the process ends.

    Example:
        >>> hvd.shutdown()
        >>> hvd.is_initialized()
        False
        >>> hvd.init()
    """
    global active, servers_have_ended
    world, active = active, None
    if world is not None:
        servers_have_ended |= world.everyone is not None
        for leave in world.before_leaving:
            leave()
        _core.close_on_exit(())
        for team in world.all_teams():
            team.close()
            team.retire()
        for process_set in world.process_sets.values():
            process_set.unregister()


def leave_for_good() -> None:
    """Closes the engines when the process ends: just before MPI is finalized."""
    if active is not None:
        for leave in active.before_leaving:
            leave()
        for team in reversed(active.all_teams()):
            team.close(True)


def is_initialized() -> bool:
    """Whether there is a world: after `init`, before `shutdown`.

    Example:
        >>> hvd.is_initialized()
        True
    """
    return active is not None


def rank() -> int:
    """This process's number in the world, from 0.

    Raises:
        ValueError: Before `init`.

    Example:
        On rank 0 of 2:

        >>> hvd.rank()
        0
    """
    return current().rank


def size() -> int:
    """The number of ranks in the world.

    Raises:
        ValueError: Before `init`.

    Example:
        On rank 0 of 2:

        >>> hvd.size()
        2
    """
    return current().size


def local_rank() -> int:
    """This process's number on its host, from 0.

    Raises:
        ValueError: Before `init`.

    Example:
        On rank 0 of 2:

        >>> hvd.local_rank()
        0
    """
    return current().placement.local_rank


def local_size() -> int:
    """The number of ranks on this host.

    Raises:
        ValueError: Before `init`.

    Example:
        With two ranks on one host:

        >>> hvd.local_size()
        2
    """
    return current().placement.local_size


def cross_rank() -> int:
    """This process's number among the ranks with its local rank.

    Raises:
        ValueError: Before `init`.

    Example:
        With two ranks on one host:

        >>> hvd.cross_rank()
        0
    """
    return current().placement.cross_rank


def cross_size() -> int:
    """The number of ranks with this local rank, one per host.

    Raises:
        ValueError: Before `init`.

    Example:
        With two ranks on one host:

        >>> hvd.cross_size()
        1
    """
    return current().placement.cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks.

    Raises:
        ValueError: Before `init`.

    Example:
        >>> hvd.is_homogeneous()
        True
    """
    return current().placement.homogeneous


def _after_fork_in_child() -> None:
    if active is not None:
        for team in active.all_teams():
            team.forked()


os.register_at_fork(after_in_child=_after_fork_in_child)
