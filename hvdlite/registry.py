"""Starts the world, and registers and removes process sets."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from hvdlite.asynchronous.leaving import tell_servers_at_the_end
from hvdlite.asynchronous.server import serve
from hvdlite.collectives.objects import allgather_object, attempt, gather_results, unwrap
from hvdlite.errors import HorovodInternalError, LaunchError
from hvdlite.observe import pulses, summary
from hvdlite.timeline import start_timeline
from hvdlite.world import starting, world
from hvdlite.world.process.exits import is_supervised
from hvdlite.world.teams.placement import part_of
from hvdlite.world.teams.process_sets import ProcessSet, global_process_set
from hvdlite.world.teams.team import Team, make_team, team_of_one
from hvdlite.world.telling import stacks

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

Thing = TypeVar("Thing")

# Before `init`, as that may wait for a rank that hangs between its import and its `init`.
stacks.offer()

# Only one thread at a time adds or removes a set.
_changing = threading.Lock()


def init(
    comm: Intracomm | Sequence[int] | None = None,
    process_sets: Sequence[ProcessSet | Iterable[int]] | str | None = None,
) -> None:
    """Makes this process a rank of the world. Does nothing if it already is one.

    On a server (hvdrun --servers) it does not return: it serves until all workers have left, and
    then ends the process with exit code 0, by SystemExit.

    Collective: every process of the world calls it, and it returns when all have. Without an MPI
    launcher, the world consists of the processes of this host that torchrun or the like has
    started, or that have a process group of torch.distributed; any other process is a world of one.

    It also selects a GPU (knob `gpu`) and gives torch this rank's share of the host's cores, unless
    the user has chosen a number of threads.

    Args:
        comm: An mpi4py communicator, which is duplicated; or a list of ranks of MPI.COMM_WORLD; or
            None for all of them.
        process_sets: Sets to register, as by `add_process_set`, in the same order on every rank.
            "dynamic" is accepted for Horovod's sake: you can always add sets at any time.

    Raises:
        LaunchError: The processes can't become one world: a launcher of another MPI, several hosts
            without MPI, ranks that do not come, no memory to share. If it concerns all ranks, all
            raise it.
        ConfigError: A variable that can't be parsed.
        ValueError: `comm` does not contain this process; an impossible process set; a timeline
            (knob `timeline`) that can't be written; a number of ranks that does not divide V of
            HVDLITE_DETERMINISTIC=virtual:V.
        HorovodInternalError: The ranks pass different sets, or one of them a bad one. There is no
            world then, as after any failure to register the sets.

    Example:
        On two ranks; a second call does nothing:

        >>> hvd.init()
        >>> hvd.size()
        2
    """
    if world.is_initialized() and world.current().used_by_api:
        return
    starting.begin(comm)
    active = world.current()
    if active.is_server:
        _serve(active)
    active.used_by_api = True
    if active.everyone is not None:
        tell_servers_at_the_end(active)
    try:
        for process_set in _sets_to_add(process_sets):
            add_process_set(process_set)
        config = world.current().config
        if config.summary:
            summary.begin(world.current())
        if config.monitored and is_supervised():
            pulses.begin(world.current(), summary.begun().progress)
        timeline = config.timeline
        if timeline and timeline != "DYNAMIC":  # Horovod's word for: not from the start
            start_timeline(timeline)
    except BaseException:
        world.shutdown()
        raise


def _serve(active: world.World) -> NoReturn:
    """What `init` does on a server: it serves until all workers have left, and ends the process."""
    assert active.everyone is not None
    try:
        serve(active.everyone)
    finally:
        world.shutdown()
    sys.exit(0)


def add_process_set(process_set: ProcessSet | Iterable[int] | Intracomm) -> ProcessSet:
    """Registers a set of ranks, whose members can then run collectives on it. Blocks.

    Every rank of the world calls it, members or not, in the same order among such calls.

    Args:
        process_set: One that is not registered yet, or the ranks or communicator to make one. If
            made of communicators, the ranks' sets may differ as long as no rank is in two of them
            (`comm.Split`): all of them are then registered, and each rank gets its own.

    Returns:
        The set; the same object if one was given.

    Raises:
        ValueError: A bad argument; ranks that the world does not have; a set with the same members
            is already registered.
        HorovodInternalError: The ranks' sets differ, or one of them is bad; on every rank. (The
            rank with the bad set raises a ValueError, or the error of its iterable.)
        LaunchError: The members can't share memory. On every rank.

    Example:
        On rank 0 of 2:

        >>> first = hvd.add_process_set([0])
        >>> if first.included():
        ...     print(hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=first))
        tensor([1.])
        >>> hvd.remove_process_set(first)
        True
    """
    with _changing:
        active = world.current()
        added: ProcessSet | None = None

        def propose() -> tuple[tuple[int, ...], bool]:
            nonlocal added
            added = _checked_set(active, process_set)
            return added.wanted or (), added.wanted_comm is not None

        proposals = _gather("add_process_set", propose)
        assert added is not None
        distinct = sorted({ranks for ranks, _ in proposals})
        if len(distinct) > 1 and not _is_partition(proposals):
            other = next(r for r, (ranks, _) in enumerate(proposals) if ranks != proposals[0][0])
            raise HorovodInternalError(
                f"add_process_set: rank {other} adds {list(proposals[other][0])}, rank 0 "
                f"{list(proposals[0][0])}; every rank of the world must add the same sets in the "
                "same order"
            )
        team = _make_team(active, added)
        for ranks in distinct:
            mine = ranks == added.wanted
            registered = added if mine else ProcessSet(ranks)
            number = active.next_process_set
            active.next_process_set += 1
            registered.register(number, ranks, team if mine else None)
            active.process_sets[number] = registered
            active.on_teams_changed()
        return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a process set: its pending operations fail, and it can't be used any more. Blocks.

    Every rank of the world calls it, members or not.

    Returns:
        False if it is the global one or not registered; then nothing happens.

    Raises:
        ValueError: Not a process set.
        HorovodInternalError: The ranks remove different sets; on every rank.

    Example:
        >>> first = hvd.add_process_set([0])
        >>> hvd.remove_process_set(first)
        True
        >>> hvd.remove_process_set(first)
        False
    """
    with _changing:
        active = world.current()

        def number_of() -> int | None:
            given: object = process_set
            if not isinstance(given, ProcessSet):
                what = f"{given!r} is {type(given).__name__}"
                raise ValueError(f"remove_process_set: {what}, expected a ProcessSet")
            number = process_set.process_set_id
            return number if active.process_sets.get(number or 0) is process_set else None

        numbers = _gather("remove_process_set", number_of)
        number = numbers[active.rank]
        for rank, other in enumerate(numbers):
            if other != numbers[0]:
                raise HorovodInternalError(
                    f"remove_process_set: rank {rank} removes process set {other}, rank 0 "
                    f"{numbers[0]}; every rank of the world must remove the same ones in the "
                    "same order"
                )
        if number is None or process_set is global_process_set:
            return False
        team = process_set.team
        del active.process_sets[number]
        active.on_teams_changed()
        process_set.unregister()
        if team is not None:
            team.close_together()
        return True


def _sets_to_add(process_sets: Any) -> list[ProcessSet | Iterable[int]]:
    """The sets that all ranks pass to `init`.

    Raises:
        ValueError: The argument is not a list of sets.
        HorovodInternalError: Other ranks pass more or fewer sets, or something else.
    """
    sets: list[Any] = []

    def count() -> int:
        if isinstance(process_sets, Iterable) and not isinstance(process_sets, str):
            sets.extend(process_sets)
        elif process_sets is not None and process_sets != "dynamic":
            raise ValueError(
                f"init: process_sets={process_sets!r}, expected a list of sets, or 'dynamic'"
            )
        return len(sets)

    own, failure = attempt("init", count)
    peers = world.current().team.peers
    # Not by the engine, like everything else in init: it is for the user's operations.
    given = [own] if peers is None else peers.allgather(own)
    if failure is not None:
        raise failure
    numbers = list(map(unwrap, given))
    for rank, number in enumerate(numbers):
        if number != numbers[0]:
            raise HorovodInternalError(
                f"init: rank {rank} passes {number} process sets, rank 0 {numbers[0]}; every rank "
                "must pass the same sets in the same order"
            )
    return sets


def _gather(what: str, own: Callable[[], Thing]) -> list[Thing]:
    """The results of `own` on all ranks of the world. Collective; an exception on one fails on
    all."""
    return gather_results(what, own, f"hvdlite.{what}", global_process_set)


def _checked_set(active: world.World, process_set: Any) -> ProcessSet:
    """The set to register, with its members looked up.

    Raises:
        ValueError: It can't be registered.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if added.ranks is not None:
        raise ValueError(f"add_process_set: {added!r} is already registered")
    if added.wanted_comm is not None:
        added.wanted = _world_ranks(active, added)
    assert added.wanted is not None
    if added.wanted[-1] >= active.size:
        raise ValueError(
            f"add_process_set: {added!r} has rank {added.wanted[-1]}, but the world has ranks 0 to "
            f"{active.size - 1}"
        )
    for other in active.process_sets.values():
        if other.ranks == list(added.wanted):
            raise ValueError(
                f"add_process_set: {other!r} has the same members and is already registered"
            )
    return added


def _world_ranks(active: world.World, process_set: ProcessSet) -> tuple[int, ...]:
    """The world ranks of a communicator's members.

    Raises:
        ValueError: It is null, or has processes that are not in the world.
    """
    comm = process_set.wanted_comm
    if active.mpi_runtime is None or active.team.comm is None:
        raise ValueError(f"{process_set!r}: this world of one rank has no MPI communicators")
    if comm == active.mpi_runtime.MPI.COMM_NULL:
        raise ValueError("this rank's communicator is null; pass the members' ranks instead")
    group = comm.Get_group()
    world_group = active.team.comm.Get_group()
    ranks = group.Translate_ranks(None, world_group)
    group.Free()
    world_group.Free()
    if active.mpi_runtime.MPI.UNDEFINED in ranks:
        raise ValueError(f"{process_set!r} has processes that are not in the world")
    return tuple(sorted(ranks))


def _is_partition(proposals: Sequence[tuple[tuple[int, ...], bool]]) -> bool:
    """Whether the sets come from communicators, and each rank is only in the one that it passes."""
    members = [rank for ranks in {ranks for ranks, _ in proposals} for rank in ranks]
    return (
        all(from_comm for _, from_comm in proposals)
        and len(members) == len(set(members))
        and all(rank in ranks for rank, (ranks, _) in enumerate(proposals))
    )


def _make_team(active: world.World, added: ProcessSet) -> Team | None:
    """This process's team in the set; None if it is not a member. Collective over the world.

    Raises:
        LaunchError: A member failed; on every rank.
    """
    team, problem = None, None
    assert added.wanted is not None
    if active.rank in added.wanted:
        try:
            team = _team(active, added.wanted)
        except Exception as error:
            problem = f"rank {active.rank}: {error or type(error).__name__}"
    problems = allgather_object(problem, "hvdlite.add_process_set")
    if any(problems):
        if team is not None:
            team.close_together()
        found = "; ".join(sorted({text for text in problems if text}))
        raise LaunchError(f"add_process_set: {added!r}: {found}")
    return team


def _team(active: world.World, ranks: tuple[int, ...]) -> Team:
    """Collective over the ranks."""
    world_peers = active.team.peers
    if world_peers is None:
        return team_of_one(active.config, active.placement)
    assert active.table is not None
    peers = world_peers.part(ranks, f"process set {active.next_process_set}")
    placement = part_of(active.placement, ranks)
    if len(placement.hosts) > 1 and not peers.any_thread:
        # Only the engine in which a thread waits makes progress: two ranks that wait in different
        # sets would wait forever.
        peers.free()
        raise LaunchError(
            f"{peers.version()} lets only one thread at a time call it, so a process "
            "set on several hosts can't be used beside the global one; start MPI with "
            "MPI_THREAD_MULTIPLE"
        )
    try:
        return make_team(active.config, active.table, peers, placement, ranks)
    except Exception:  # on every member alike
        peers.free()
        raise
