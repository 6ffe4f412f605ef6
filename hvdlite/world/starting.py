"""Makes the world of this process: finds its ranks, places them on hosts and sets them up.

docs/design/starting-and-ending.md has the table of which world a process belongs to.
"""

from __future__ import annotations

import dataclasses
import os
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hvdlite.errors import HorovodInternalError, LaunchError
from hvdlite.world import faults, world
from hvdlite.world.bootstrap import communicators, mpi, through_store, torch_place
from hvdlite.world.bootstrap.peers import MpiPeers, Peers
from hvdlite.world.config import Config
from hvdlite.world.process import cpu_threads, gpu_pinning
from hvdlite.world.process.exits import Exits, HostExits
from hvdlite.world.teams import algorithm_table
from hvdlite.world.teams.placement import Placement, own_host_name, part_of, placement_of
from hvdlite.world.teams.roles import Everyone, Roles, roles_of
from hvdlite.world.teams.team import Team, make_team, team_of_one
from hvdlite.world.telling import launcher_link, logs, stacks
from hvdlite.world.virtual_ranks import micro_batches, same_threads
from hvdlite.world.world import World
from hvdrun.for_hvdlite import notes

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

_exits: Exits | None = None
_host_exits: HostExits | None = None
_warned_child = False


def begin(comm: Intracomm | Sequence[int] | None = None) -> None:
    """Makes this process a rank of the world. Does nothing if it is one already.

    Collective: every process of the world calls it, and it returns when all have. Without an MPI
    launcher, the processes of this host that torchrun or its like has started, or that have a
    process group of torch.distributed, are the world; any other process is a world of one.

    Also pins a GPU (knob `gpu`) and gives torch this rank's share of the host's cores, unless the
    user has chosen a number of threads.

    Args:
        comm: An mpi4py communicator, which is duplicated; or a list of ranks of MPI.COMM_WORLD; or
            None for all of them.

    Raises:
        LaunchError: The processes can't become one world: the launcher belongs to another MPI, or
            they are on several hosts without MPI, or ranks do not come, or there is too little
            memory to share. Raised on every rank if it concerns all.
        ConfigError: A variable that can't be parsed.
        ValueError: `comm` does not contain this process; the number of ranks does not divide that
            of the virtual ranks.
    """
    if not world.is_initialized():
        _begin(comm, None)


def begin_with_store(store: Any, rank: int, size: int, timeout_s: float) -> None:
    """Makes this process a rank of the world of a process group's ranks. Does nothing if the world
    exists. Collective over these ranks.

    store: a Store of torch.distributed that they share. It is not used after this.

    Raises:
        LaunchError: The world has another size, or this process another rank in it; else as
            `begin`.
    """
    if not world.is_initialized():
        _begin(None, through_store.Place(store, rank, size, timeout_s, "group"))
    of_world = world.rank(), world.size()
    if of_world != (rank, size):
        raise LaunchError(
            f"the process group has this process as rank {rank} of {size}, but hvdlite's world has "
            f"it as rank {of_world[0]} of {of_world[1]}; make the first process group of all ranks "
            "of the world, with the same ranks, or call hvdlite.shutdown() before"
        )


def _begin(comm: Intracomm | Sequence[int] | None, place: through_store.Place | None) -> None:
    """place: where the world's ranks meet without MPI, if the caller knows it."""
    config = Config.from_env()
    logs.set_level(config)
    faults.of_rank(config, 0)  # a text that can't be parsed is an error before ranks meet
    if comm is None and place is None and world.servers_have_ended:
        raise LaunchError(
            "init: this process has left a job with servers (HVDLITE_SERVERS, hvdrun --servers), "
            "which end when the workers leave; call init() once and shutdown() at the end only, or "
            "start a new job"
        )
    parent = mpi.started_by_rank(config.rank_process, os.environ)
    if comm is None and place is None and parent is not None:
        _warn_child_of_rank(parent)
        # A fault of rank 0 is not one of every child of a rank.
        world.enter(_world_of_one(dataclasses.replace(config, fault="")))
    elif comm is not None or _is_mpis(config, place):
        if not (parent or config.alone or mpi.launcher_of(os.environ)) and _is_of_one(comm):
            torch_place.check_alone(os.environ)
        stacks.offer()
        launcher_link.tell(notes.INIT_BEGUN)
        try:
            made = _world_of_mpi(config, comm, place)
            _enter_together(made)
        except BaseException:
            launcher_link.tell(notes.INIT_FAILED)
            raise
        launcher_link.tell(notes.INIT_DONE, f"{made.rank} {made.size}".encode())
    else:
        _enter_together(_world_without_mpi(config, place))


def _tell_if_unchecked(leaves: World) -> None:
    """A user of DDP expects a comparison that there is not."""
    if not leaves.had_reduced_step:
        logs.log.warning(
            "HVDLITE_CHECK_PARAMETERS has compared nothing: it compares after steps of a "
            "DistributedOptimizer with reduced gradients, and there were none; for a model of DDP "
            "call hvd.check_parameters(model)"
        )


def _enter_together(made: World) -> None:
    """Makes it the world of this process, if that works on all ranks; else no rank has a world.
    Collective over the workers; a server enters it alone.

    Raises:
        HorovodInternalError: It has failed on another rank.
    """
    failure = None
    if made.config.steps_between_checks and made.rank == 0 and made.size > 1:
        made.before_leaving.append(lambda: _tell_if_unchecked(made))
    try:
        world.enter(made)
    except BaseException as error:
        failure = error
    said = "".join(traceback.format_exception_only(failure)).strip() if failure else ""
    peers = None if made.is_server else made.team.peers
    by_rank = [said] if peers is None else peers.allgather(said)
    if not any(by_rank):
        return
    world.shutdown()
    if failure is not None:
        raise failure
    rank = next(rank for rank, text in enumerate(by_rank) if text)
    places = zip(made.placement.hosts, made.placement.host_names, strict=True)
    host = next(name for ranks, name in places if rank in ranks)
    raise HorovodInternalError(
        f"init failed on rank {rank} on {host}: {by_rank[rank]}; mend that there, and call"
        " hvd.init() on every rank again"
    )


def _is_mpis(config: Config, place: through_store.Place | None) -> bool:
    """Whether an MPI launcher has started the ranks, and not a process that has started them."""
    launcher = mpi.launcher_of(os.environ)
    if launcher is None or mpi.is_task_of_a_rank(config.rank_process, os.environ):
        return False
    if mpi.is_step_without_pmi(os.environ) and (place or torch_place.is_known(os.environ)):
        return False
    size = launcher[1]
    if place is not None:
        return size is None or size == place.size
    by_torchrun = torch_place.rank_of_torch(os.environ) if _has_torchrun() else None
    return by_torchrun is None or size is None or by_torchrun[1] == size


def _has_torchrun() -> bool:
    return bool(os.environ.get("TORCHELASTIC_RUN_ID"))


def _world_without_mpi(config: Config, place: through_store.Place | None) -> World:
    if config.alone and place is not None and place.size > 1:
        raise LaunchError(
            f"a process group of {place.size} ranks is made where HVDLITE_ALONE=1 asks for a world "
            "of one; unset it"
        )
    if place is None and not config.alone:
        place = torch_place.find(os.environ)
        if place is None:
            torch_place.check_alone(os.environ)
    if place is None or place.size == 1:
        if config.servers and not config.alone:
            raise LaunchError(
                f"HVDLITE_SERVERS={config.servers}, but this process is the only one of its job, "
                "and no launcher has started it; start with hvdrun -np "
                f"{config.servers + 1} --servers {config.servers}, or unset the variable"
            )
        return _world_of_one(config)
    warn_s = 0.0 if config.stall_check_disable else config.stall_check_time_seconds
    peers = through_store.meet(place, warn_s)
    try:
        _end_without_mpi(place.rank)
        return _world_of_peers(peers, config, None)
    except BaseException:
        peers.free()
        raise


def _end_without_mpi(rank: int) -> None:
    """Says how this process ends, and marks it as a rank for its children."""
    global _host_exits
    if _host_exits is None:
        _host_exits = HostExits(rank, world.leave_for_good)
    _host_exits.rank = rank
    os.environ["HVDLITE_RANK_PROCESS"] = mpi.rank_process(os.environ)


def _is_of_one(comm: Intracomm | Sequence[int] | None) -> bool:
    """Whether a process without an MPI launcher asks for a world of this one rank."""
    return comm is None or isinstance(comm, Sequence) or comm.Get_size() == 1


def _world_of_one(config: Config) -> World:
    placement = Placement(0, ((0,),), (own_host_name(),))
    _pin([gpu_pinning.visible_devices(config.gpu)], 0, config)
    same_threads(config)
    cpus = cpu_threads.cpus_per_rank([cpu_threads.own_cores()], 0)
    faults.put_into_core(config, 0)
    return World(placement, team_of_one(config, placement), config, None, cpus_per_rank=cpus)


def _world_of_mpi(
    config: Config, comm: Intracomm | Sequence[int] | None, place: through_store.Place | None
) -> World:
    mpi_runtime = mpi.load()
    mpi.check_launcher(mpi_runtime, os.environ)
    world_comm = mpi.world_comm(mpi_runtime, comm)
    try:
        if comm is None:
            of_torch = torch_place.rank_of_torch(os.environ)
            of_torch = of_torch if place is None else (place.rank, place.size)
            world_comm = mpi.in_torch_order(mpi_runtime, world_comm, of_torch)
    except Exception:  # on every rank alike
        communicators.retire(world_comm)
        raise
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
        _exits.before_finalize(world.leave_for_good)
        os.environ["HVDLITE_RANK_PROCESS"] = mpi.rank_process(os.environ)
    return _world_of_peers(MpiPeers(mpi_runtime, world_comm), config, mpi_runtime)


def _world_of_peers(peers: Peers, config: Config, mpi_runtime: mpi.MpiRuntime | None) -> World:
    """Collective. peers: the world owns them from now on."""
    placement = whole = placement_of(peers, config.host_ranks)
    _check_settings(peers, config)
    # On all ranks, as the setting is the same.
    roles = roles_of(placement, config.servers) if config.servers else None
    workers = tuple(range(placement.size)) if roles is None else roles.workers
    micro_batches(config, len(workers))
    if placement.rank in workers:  # the text names these, by their ranks among themselves
        faults.put_into_core(config, workers.index(placement.rank))
    table = algorithm_table.from_rank_0(config, peers)
    facts = peers.allgather((cpu_threads.own_cores(), gpu_pinning.visible_devices(config.gpu)))
    local_cores = [facts[rank][0] for rank in placement.local_ranks]
    local_devices = [facts[rank][1] for rank in placement.local_ranks]
    _pin_together(peers, local_devices, placement.local_rank, config)
    ranks = tuple(range(placement.size))
    everyone = None
    if roles is None:
        team = make_team(config, table, peers, placement, ranks)
    else:
        everyone = _everyone(config, table, peers, placement, roles)
        team = everyone.team
        if not everyone.is_server:
            placement = part_of(placement, roles.workers)
            team = _team_of_workers(config, table, peers, placement, roles)
    _divide_cores(local_cores, whole.local_rank)
    same_threads(config)
    cpus_per_rank = cpu_threads.cpus_per_rank(local_cores, whole.local_rank)
    return World(placement, team, config, mpi_runtime, table, cpus_per_rank, everyone)


def _everyone(
    config: Config,
    table: algorithm_table.AlgorithmTable,
    peers: Peers,
    placement: Placement,
    roles: Roles,
) -> Everyone:
    """The team of workers and servers. Collective over them."""
    if len(placement.hosts) > 1 and not peers.any_thread:
        raise LaunchError(
            f"{peers.version()} lets only one thread at a time call it, so a job on several hosts "
            "can't have servers (--servers); start MPI with MPI_THREAD_MULTIPLE"
        )
    # A server waits for its workers for as long as they compute, so nothing there is late.
    # Faults on purpose name workers, by their ranks among workers.
    quiet = dataclasses.replace(config, stall_check_disable=True, fault="")
    ranks = tuple(range(placement.size))
    team = make_team(quiet, table, peers, placement, ranks, "everyone")
    return Everyone(team, placement, roles)


def _team_of_workers(
    config: Config,
    table: algorithm_table.AlgorithmTable,
    peers: Peers,
    placement: Placement,
    roles: Roles,
) -> Team:
    """Collective over the workers. placement: theirs."""
    ranks = tuple(range(len(roles.workers)))
    if len(ranks) == 1:
        return team_of_one(config, placement)
    return make_team(config, table, peers.part(roles.workers, "workers"), placement, ranks)


def _check_settings(peers: Peers, config: Config) -> None:
    """Raises LaunchError, on every rank, if ranks have different values of a setting that must be
    equal: they would split the data differently."""
    sizes = ("inline", "block", "segment", "piece", "bucket", "first_bucket")
    names = [*(f"{size}_bytes" for size in sizes), "algorithm", "deterministic", "gpu_collectives"]
    values_by_rank = peers.allgather([getattr(config, name) for name in names])
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
    peers: Peers, local: Sequence[gpu_pinning.Visible], local_rank: int, config: Config
) -> None:
    """Collective. Raises LaunchError if another rank failed."""
    failure: Exception | None = None
    try:
        _pin(local, local_rank, config)
    except Exception as error:
        failure = error
    problem = None if failure is None else f"init failed on rank {peers.rank}: {failure}"
    problems = [text for text in peers.allgather(problem) if text]
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
