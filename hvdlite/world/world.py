"""The world of this process: init, shutdown, and the ranks.

A process has at most one world at a time. `active` is None before `init` and after `shutdown`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from hvdlite import _core
from hvdlite.errors import LaunchError, NotInitializedError
from hvdlite.world import (
    algorithm_table,
    communicators,
    cpu_threads,
    gpu_pinning,
    launcher_link,
    logs,
    mpi,
)
from hvdlite.world.alone import is_alone
from hvdlite.world.config import Config
from hvdlite.world.exits import Exits
from hvdlite.world.placement import Placement
from hvdlite.world.process_sets import ProcessSet, global_process_set
from hvdlite.world.teams import Team, make_team, team_of_one
from hvdrun.for_hvdlite import notes

if TYPE_CHECKING:
    from mpi4py.MPI import Comm, Intracomm


class World:
    """What `init` makes: the placement of this rank, and the team of all ranks."""

    def __init__(
        self,
        placement: Placement,
        team: Team,
        config: Config,
        mpi_runtime: mpi.MpiRuntime | None,
        table: algorithm_table.AlgorithmTable | None = None,
        cpus_per_rank: float = 1.0,
    ) -> None:
        self.placement = placement
        self.team = team
        self.config = config
        self.mpi_runtime = mpi_runtime
        # The algorithms between hosts; None in a world of one.
        self.table = table
        # Hardware threads of this host per rank, if all its ranks may use as many as this one.
        self.cpus_per_rank = cpus_per_rank
        self.rank = placement.rank
        self.size = placement.size
        # The registered process sets, by number; 0 is the global one.
        self.process_sets: dict[int, ProcessSet] = {}
        # The number of the next set to register; the same on all ranks.
        self.next_process_set = 1
        # Called when this rank leaves the world, while the engines still work.
        self.before_leaving: list[Callable[[], None]] = []
        # Called when a team is added or removed.
        self.teams_changed: list[Callable[[], None]] = []

    def teams(self) -> list[Team]:
        """The teams of all process sets that this process is a member of."""
        return [s.team for s in self.process_sets.values() if s.team is not None]

    def on_teams_changed(self) -> None:
        """A team was added or removed. When the process ends, it leaves all teams in good order:
        the same order on every rank, the world last."""
        if self.mpi_runtime is not None and self.mpi_runtime.finalize:
            _core.close_on_exit(tuple(team.engine for team in reversed(self.teams())))
        for tell in self.teams_changed:
            tell()


# A call that waits for long asks whether another thread could end it.
_core.use_alone(is_alone)

active: World | None = None

_exits: Exits | None = None
_warned_child = False


def current() -> World:
    """The world.

    Raises:
        NotInitializedError: (a ValueError) before `init` and after `shutdown`.
    """
    if active is None:
        raise NotInitializedError
    return active


def begin(comm: Intracomm | Sequence[int] | None = None) -> None:
    """Makes this process a rank of the world. Does nothing if it is one already.

    Collective: every process of the world calls it, and it returns when all have. A process that no
    MPI launcher started is a world of one, which needs no MPI.

    Also pins a GPU (knob `gpu`) and gives torch this rank's share of the host's cores, unless the
    user has chosen a number of threads.

    Args:
        comm: An mpi4py communicator, which is duplicated; or a list of ranks of MPI.COMM_WORLD; or
            None for all of them.

    Raises:
        LaunchError: The processes can't become one world: the launcher belongs to another MPI, or
            starts torch.distributed without MPI (knob `alone`), or there is too little memory to
            share. Raised on every rank if it concerns all.
        ConfigError: A variable that can't be parsed.
        ValueError: `comm` does not contain this process.
    """
    global active
    if active is not None:
        return
    config = Config.from_env()
    logs.set_level(config)
    parent = mpi.started_by_rank(config.rank_process, os.environ)
    has_launcher = mpi.launcher_of(os.environ) is not None
    if not (parent or has_launcher or config.alone) and _is_of_one(comm):
        mpi.check_alone(os.environ)
    if parent is not None and comm is None:
        _warn_child_of_rank(parent)
        active = _world_of_one(config)
    elif comm is None and not has_launcher:
        active = _world_of_one(config)
    else:
        launcher_link.tell(notes.INIT_BEGUN)
        try:
            active = _world_of_many(config, comm)
        except BaseException:
            launcher_link.tell(notes.INIT_FAILED)
            raise
        launcher_link.tell(notes.INIT_DONE)
    global_process_set.register(0, active.team.ranks, active.team)
    active.process_sets[0] = global_process_set
    active.on_teams_changed()
    logs.describe(active)


def shutdown() -> None:
    """Leaves the world. Not collective, and does not wait for any rank.

    This rank's pending operations fail; an operation of other ranks that needs this rank fails
    there, with an error that says that it has left. `init` works again afterwards, if all ranks
    call it. Runs by itself when the process ends.

    Example:
        >>> hvd.shutdown()
        >>> hvd.is_initialized()
        False
        >>> hvd.init()
    """
    global active
    world, active = active, None
    if world is not None:
        for leave in world.before_leaving:
            leave()
        _core.close_on_exit(())
        for team in world.teams():
            team.close()
            communicators.retire(*team.comms())
        for process_set in world.process_sets.values():
            process_set.unregister()


def _leave_for_good() -> None:
    """Closes the engines just before MPI is finalized."""
    if active is not None:
        for leave in active.before_leaving:
            leave()
        for team in reversed(active.teams()):
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


def _is_of_one(comm: Intracomm | Sequence[int] | None) -> bool:
    """Whether a process without an MPI launcher asks for a world of this one rank."""
    return comm is None or isinstance(comm, Sequence) or comm.Get_size() == 1


def _world_of_one(config: Config) -> World:
    placement = Placement(0, ((0,),), (socket.gethostname(),))
    _pin([gpu_pinning.visible_devices(config.gpu)], 0, config)
    cpus = cpu_threads.cpus_per_rank([cpu_threads.own_cores()], 0)
    return World(placement, team_of_one(config, placement), config, None, cpus_per_rank=cpus)


def _world_of_many(config: Config, comm: Intracomm | Sequence[int] | None) -> World:
    mpi_runtime = mpi.load()
    mpi.check_launcher(mpi_runtime, os.environ)
    world_comm = mpi.world_comm(mpi_runtime, comm)
    communicators.free_retired(mpi_runtime, world_comm)
    try:
        return _world_on(mpi_runtime, world_comm, config)
    except Exception:  # on every rank alike
        communicators.retire(world_comm)
        raise


def _world_on(mpi_runtime: mpi.MpiRuntime, world_comm: Intracomm, config: Config) -> World:
    """world_comm: the world owns it from now on."""
    global _exits
    if _exits is None:
        _exits = Exits(mpi_runtime, world_comm, world_comm.Get_rank())
        _exits.before_finalize(_leave_for_good)
        os.environ["HVDLITE_RANK_PROCESS"] = mpi.rank_process(os.environ)
    placement = mpi.placement_of(mpi_runtime, world_comm, config.host_ranks)
    _check_settings(world_comm, config)
    table = algorithm_table.from_rank_0(config, world_comm)
    local = communicators.split(mpi_runtime, world_comm, placement.host)
    local_cores = local.allgather(cpu_threads.own_cores())
    local_devices = local.allgather(gpu_pinning.visible_devices(config.gpu))
    communicators.free(local)
    _pin_together(world_comm, local_devices, placement.local_rank, config)
    ranks = tuple(range(placement.size))
    team = make_team(config, table, mpi_runtime, world_comm, placement, ranks)
    _divide_cores(local_cores, placement.local_rank)
    cpus_per_rank = cpu_threads.cpus_per_rank(local_cores, placement.local_rank)
    return World(placement, team, config, mpi_runtime, table, cpus_per_rank)


def _check_settings(world_comm: Comm, config: Config) -> None:
    """Raises LaunchError, on every rank, if ranks have different values of a setting that must be
    equal: they would split the data differently."""
    sizes = ("inline", "block", "segment", "piece", "bucket", "first_bucket")
    names = [*(f"{size}_bytes" for size in sizes), "algorithm", "deterministic", "gpu_collectives"]
    values_by_rank = world_comm.allgather([getattr(config, name) for name in names])
    for name, values in zip(names, zip(*values_by_rank, strict=True), strict=True):
        for rank, value in enumerate(values):
            if value != values[0]:
                raise LaunchError(
                    f"HVDLITE_{name.upper()} is {value} on rank {rank} and {values[0]} on rank 0; "
                    "set the same value on every rank (hvdrun passes exported variables to all)"
                )


def _divide_cores(local: Sequence[cpu_threads.Cores], local_rank: int) -> None:
    """Limits torch to this rank's share of the cores; never raises its number of threads."""
    share = cpu_threads.threads_for(local, local_rank)
    if not cpu_threads.chosen_by_user(os.environ) and torch.get_num_threads() > share:
        torch.set_num_threads(share)


def _pin(local: Sequence[gpu_pinning.Visible], local_rank: int, config: Config) -> None:
    choice = gpu_pinning.choose(local, local_rank, config.gpu)
    gpu_pinning.apply(choice)


def _pin_together(
    world_comm: Comm, local: Sequence[gpu_pinning.Visible], local_rank: int, config: Config
) -> None:
    """Collective over `world_comm`. Raises LaunchError if another rank failed."""
    failure: Exception | None = None
    try:
        _pin(local, local_rank, config)
    except Exception as error:
        failure = error
    problem = None if failure is None else f"init failed on rank {world_comm.Get_rank()}: {failure}"
    problems = [text for text in world_comm.allgather(problem) if text]
    if failure is not None:
        raise failure
    if problems:
        raise LaunchError(problems[0])


def _warn_child_of_rank(parent: int) -> None:
    global _warned_child
    if not _warned_child:
        _warned_child = True
        logs.log.warning(
            "a rank (process %d) started this process, so it is a world of one; unset "
            "HVDLITE_RANK_PROCESS to make it a rank of a job of its own",
            parent,
        )


def _after_fork_in_child() -> None:
    if active is not None:
        for team in active.teams():
            team.forked()


os.register_at_fork(after_in_child=_after_fork_in_child)
