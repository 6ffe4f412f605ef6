"""A team: the ranks of one process set, and this process's engine for it.

Each process set has its own engine, with its own shared memory and its own communicator. So
operations of one set never wait for those of another, and a failure in one set stays in it.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from hvdlite import _core
from hvdlite.errors import HorovodInternalError, LaunchError
from hvdlite.world import faults
from hvdlite.world.config import Config
from hvdlite.world.teams import sent_bytes
from hvdlite.world.teams.algorithm_table import AlgorithmTable
from hvdlite.world.teams.placement import Placement
from hvdlite.world.teams.shared_memory import lack_of_memory, open_shared
from hvdlite.world.telling import black_box, launcher_link

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

    from hvdlite.world.bootstrap.peers import Peers

log = logging.getLogger("hvdlite")

MIB = 1024 * 1024
PIECE_BYTES = 8 * MIB
TOO_LARGE = (
    "not enough memory for the engine; set HVDLITE_BLOCK_BYTES, HVDLITE_INLINE_BYTES or "
    "HVDLITE_EVENT_LOG to a smaller value"
)
# Smaller, since the wire idles until the first piece is reduced on each host; after that it never
# waits.
PIECE_BYTES_BETWEEN_HOSTS = 2 * MIB


class GpuQueue(Protocol):
    """What a team needs of its GPU queue (`hvdlite.gpu.queue`), which is made above this room."""

    def close(self) -> None: ...

    def settle(self) -> None: ...


class _Names(threading.local):
    """The number of one thread's next unnamed operation, and the era in which it counts."""

    def __init__(self, thread_count: itertools.count[int]) -> None:
        # Runs in each thread, at its first use.
        self.thread = next(thread_count)
        self.begin(0)

    def begin(self, era: int) -> None:
        self.era = era
        thread = f" of thread {self.thread}" if self.thread else ""
        self.suffix = thread + (f" after join {era}" if era else "")
        self.next = 1


class Team:
    """The members of a process set, as one of them sees them.

    ranks: their world ranks; a member's index in it is its rank in the team. Those of a process set
    ascend, those of a group are in any order.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        rank: int,
        engine: _core.Engine,
        peers: Peers | None,
        engine_peers: Peers | None = None,
        progress_thread: bool = True,
        label: str = "",
    ) -> None:
        """label: of what it leaves to be freed, see `communicators.retire`."""
        self.ranks = ranks
        self.rank = rank
        self.size = len(ranks)
        self.engine = engine
        # For exchanges in Python; None for a single rank.
        self.peers = peers
        # The engine's own; None on a single host.
        self._engine_peers = engine_peers
        self.label = label
        # False if only one thread may call MPI.
        self.progress_thread = progress_thread
        # Runs collectives on GPU tensors; `hvdlite.gpu` makes it at the first one.
        self.gpu_queue: GpuQueue | None = None
        # Bound once, as every operation calls them.
        self.post: Callable[..., _core.Operation] = engine.post
        self.run: Callable[..., str | None] = engine.run
        self.run_allreduce: Callable[..., str | None] = engine.run_allreduce
        self.plan: Callable[..., _core.Plan] = engine.plan
        self.failures: Callable[[int, str], int] = engine.failures
        # Numbers this team's optimizers, in the order in which every member makes them.
        self.optimizer_numbers = itertools.count()
        self._names = _Names(itertools.count())
        # How often the members have restarted their counts, see `renumber`.
        self.era = 0
        # `sent_bytes` writes it.
        self.has_closed = False

    def unnamed(self) -> str:
        """The name of the calling thread's next unnamed operation: the same on every rank that
        makes the same calls. Threads are numbered by their first unnamed operation."""
        names = self._names
        if names.era != self.era:
            names.begin(self.era)
        number = names.next
        names.next = number + 1
        return f"unnamed.{number}{names.suffix}"  # texts: `hvdl_put_title`

    def next_unnamed(self) -> str:
        """The name that `unnamed` will return next in the calling thread."""
        name = self.unnamed()
        self._names.next -= 1
        return name

    def renumber(self) -> None:
        """Makes members that have called different operations agree again: all threads restart
        their unnamed operations under new names. Every member calls it at the same place among its
        operations."""
        self.era += 1

    def close(self, linger: bool = False) -> None:
        """Leaves the team: pending operations fail. linger: see `_core.Engine.close`."""
        sent_bytes.closes(self)
        self.engine.close(linger)
        if self.gpu_queue is not None:
            self.gpu_queue.close()

    def close_together(self) -> None:
        """Ends the team. Every member calls it; returns when none of its messages is in flight."""
        self.close(True)
        for peers in self._all_peers():
            peers.free_together()

    def retire(self) -> None:
        """After `close`: what it leaves is freed when that is possible."""
        for peers in self._all_peers():
            peers.retire(self.label)

    @property
    def comm(self) -> Intracomm | None:
        """An mpi4py communicator of the members, for the user; None without MPI."""
        return None if self.peers is None else self.peers.comm

    def comms(self) -> list[Intracomm]:
        """The communicators to free when the team has ended; the same on every member."""
        return [peers.comm for peers in self._all_peers() if peers.comm is not None]

    def _all_peers(self) -> list[Peers]:
        return [peers for peers in (self._engine_peers, self.peers) if peers is not None]

    def forked(self) -> None:
        """In a forked child: every operation raises from now on."""
        own = self.ranks[self.rank]

        def refuse(*args: object) -> Any:
            raise HorovodInternalError(
                f"this process was forked from rank {own} (a DataLoader worker, for instance) and "
                "can't take part in collectives; only the rank itself can"
            )

        self.post = self.run = self.run_allreduce = self.failures = refuse


def team_of_one(config: Config, placement: Placement, rank: int = 0) -> Team:
    """The team of a single rank, without MPI.

    placement: its own, as the only rank. rank: its world rank.

    Raises:
        LaunchError: There is too little memory.
    """
    problem = lack_of_memory(_private_bytes(config, 1))
    if problem:
        raise LaunchError(problem)
    engine = _engine(config, placement, (rank,), -1, None, True, ())
    return faults.put_into(Team((rank,), 0, engine, None), config)


def make_team(
    config: Config,
    table: AlgorithmTable,
    peers: Peers,
    placement: Placement,
    ranks: tuple[int, ...],
    label: str = "",
) -> Team:
    """Collective over `peers`, which are the members; blocks.

    peers: the team owns them from now on. On several hosts the engine gets a duplicate of its own,
        so that messages of the two never mix.
    table: the same on every member.
    placement: where the members are, by their ranks in `peers`.
    ranks: their world ranks.
    label: see `communicators.retire`.

    Raises:
        LaunchError: A member lacks memory, or MPI lacks communicators; on every member.
    """
    local = peers.split(placement.host) if len(placement.hosts) > 1 else peers
    memory_fd = -1
    try:
        hosts, memory_fd = _share(config, peers, local, placement)
        shared = Placement(placement.rank, *hosts)
        several = len(shared.hosts) > 1
        progress_thread = peers.any_thread or not several
        if not progress_thread and placement.rank == 0:
            log.warning(
                "%s lets only one thread at a time call it, so collectives make progress only "
                "inside poll() and synchronize()",
                peers.version(),
            )
        engine_peers = peers.duplicate() if several else None
        engine, problem = None, None
        try:
            engine = _engine(
                config,
                shared,
                ranks,
                memory_fd,
                None if engine_peers is None else engine_peers.wire(),
                progress_thread,
                table.for_engine(len(shared.hosts)) if several else (),
            )
        except (RuntimeError, MemoryError, OSError, ValueError) as error:
            problem = f"rank {ranks[placement.rank]}: {error if str(error) else TOO_LARGE}"
        problems = sorted({text for text in peers.allgather(problem) if text})
        if engine is None or problems:
            if engine is not None:
                engine.close()
            if engine_peers is not None:
                engine_peers.free_together()
            raise LaunchError("; ".join(problems))
    finally:
        if local is not peers:
            local.free()
        if memory_fd >= 0:
            os.close(memory_fd)
    team = Team(ranks, placement.rank, engine, peers, engine_peers, progress_thread, label)
    return faults.put_into(team, config)


def _engine(
    config: Config,
    placement: Placement,
    ranks: tuple[int, ...],
    memory_fd: int,
    wire: dict[str, int] | None,
    progress_thread: bool,
    algorithms: tuple[tuple[int, int], ...],
) -> _core.Engine:
    return _core.Engine(
        rank=placement.rank,
        hosts=placement.hosts,
        host_names=placement.host_names,
        world_ranks=ranks,
        memory_fd=memory_fd,
        wire=wire,
        progress_thread=progress_thread,
        inline_bytes=config.inline_bytes,
        block_bytes=config.block_bytes,
        segment_bytes=config.segment_bytes,
        piece_bytes=config.piece_bytes
        or (PIECE_BYTES if wire is None else PIECE_BYTES_BETWEEN_HOSTS),
        algorithms=algorithms,
        deterministic=bool(config.deterministic),
        event_capacity=config.event_log,
        stall_warning_s=0.0 if config.stall_check_disable else config.stall_check_time_seconds,
        stall_shutdown_s=0.0 if config.stall_check_disable else config.stall_shutdown_time_seconds,
        launcher=launcher_link.keeper(),
        black_box=black_box.for_engine(config, ranks),
    )


def _private_bytes(config: Config, num_hosts: int) -> int:
    """The memory that knobs make a rank allocate for itself, beside what it shares: events, and a
    packet from each other host's leader."""
    return config.event_log * _core.EVENT_BYTES + (num_hosts - 1) * config.inline_bytes


def _share(
    config: Config, peers: Peers, local: Peers, placement: Placement
) -> tuple[tuple[tuple[tuple[int, ...], ...], tuple[str, ...]], int]:
    """The hosts as the engine sees them, and the descriptor of this host's memory (-1: none).

    If the ranks of a host can't share memory, the engine treats each as a host of its own.
    """
    descriptor: int | None = -1
    problem = None
    try:
        own_bytes = placement.local_size * _private_bytes(config, len(placement.hosts))
        if placement.local_size > 1:
            sizes = placement.size, config.inline_bytes, config.block_bytes
            size_bytes = _core.memory_bytes(placement.local_size, *sizes)
            descriptor = open_shared(local, size_bytes, own_bytes)
        else:
            problem = lack_of_memory(own_bytes)
    except MemoryError as error:
        problem = str(error) or TOO_LARGE
    answers = peers.allgather((problem, descriptor is not None))
    problems = sorted({text for text, _ in answers if text})
    if problems:
        if descriptor is not None and descriptor >= 0:
            os.close(descriptor)
        raise LaunchError("; ".join(problems))
    hosts: list[tuple[int, ...]] = []
    names: list[str] = []
    for ranks, name in zip(placement.hosts, placement.host_names, strict=True):
        groups = [ranks] if answers[ranks[0]][1] else [(rank,) for rank in ranks]
        if len(groups) > 1 and placement.rank == ranks[0]:
            log.warning("the ranks on %s can't share memory; they send messages instead", name)
        hosts += groups
        names += [name] * len(groups)
    order = sorted(range(len(hosts)), key=lambda i: hosts[i][0])
    return (tuple(hosts[i] for i in order), tuple(names[i] for i in order)), (
        -1 if descriptor is None else descriptor
    )
