"""The world of this process: init, shutdown, and the ranks.

At any time there is at most one. `active` is None before `init` and after `shutdown`.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hvdlite import _core, gpu, mpi, threads
from hvdlite.config import Config
from hvdlite.errors import HorovodInternalError, LaunchError, NotInitializedError
from hvdlite.exits import Exits
from hvdlite.layout import Layout
from hvdlite.shared_memory import open_shared

if TYPE_CHECKING:
    from mpi4py.MPI import Comm, Intracomm

log = logging.getLogger("hvdlite")

LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}


class _Names(threading.local):
    """The numbers of one thread's unnamed operations."""

    def __init__(self, thread_count: itertools.count[int]) -> None:
        # Runs in each thread, at its first use.
        thread = next(thread_count)
        self.prefix = f"unnamed.{thread}." if thread else "unnamed."
        self.next: dict[int, int] = {}


class World:
    """What `init` makes: the engine, and where this rank stands."""

    def __init__(
        self, layout: Layout, engine: _core.Engine, config: Config, started: mpi.Started | None
    ) -> None:
        self.layout = layout
        self.engine = engine
        self.config = config
        self.started = started
        self.rank = layout.rank
        self.size = layout.size
        # Bound once: the way of every operation.
        self.post: Callable[..., _core.Operation] = engine.post
        # The optimizers of this world, in the order in which every rank makes them.
        self.optimizer_numbers = itertools.count()
        self._names = _Names(itertools.count())

    def unnamed(self, process_set: int) -> str:
        """The name of the next unnamed operation of the calling thread, the same on every rank that
        makes the same calls. Threads are counted by their first unnamed operation."""
        names = self._names
        number = names.next.get(process_set, 0)
        names.next[process_set] = number + 1
        return names.prefix + str(number)

    def forked(self) -> None:
        """In a forked child: the numbers answer, and nothing else works."""

        def refuse(*args: object) -> Any:
            raise HorovodInternalError(
                f"this process was forked from rank {self.rank} (a DataLoader worker, for "
                "instance) and can't take part in collectives; only the rank itself can"
            )

        self.post = refuse


active: World | None = None

_exits: Exits | None = None
_told_child = False


def current() -> World:
    """The world.

    Raises:
        NotInitializedError: (a ValueError) before `init` and after `shutdown`.
    """
    if active is None:
        raise NotInitializedError
    return active


def init(comm: Intracomm | Sequence[int] | None = None, process_sets: Any = None) -> None:
    """Makes this process a rank of the world. Does nothing where that is done already.

    Collective: every process of the world calls it, and it returns when all have. Processes without
    an MPI launcher are a world of one each, for which no MPI is needed.

    Also pins a GPU (knob `gpu`) and gives torch this rank's share of the host's cores, unless the
    user has chosen a number of threads.

    Args:
        comm: An mpi4py communicator, which is duplicated; or a list of ranks of MPI.COMM_WORLD; or
            None for all of them.
        process_sets: None; others are not supported yet.

    Raises:
        LaunchError: The processes can't become one world: a launcher of another MPI, no memory to
            share. On every rank alike where it concerns all.
        ConfigError: A variable that can't be parsed.
        ValueError: `comm` does not contain this process.
    """
    global active
    if active is not None:
        return
    if process_sets is not None:
        raise ValueError("process_sets: hvdlite has no process sets yet, leave it None")
    config = Config.from_env()
    _set_log_level(config)
    parent = mpi.started_by_rank(config.rank_process, os.environ)
    if parent is not None and comm is None:
        _tell_child(parent)
        active = _world_of_one(config)
    elif comm is None and mpi.launcher_of(os.environ) is None:
        active = _world_of_one(config)
    else:
        active = _world_of_many(config, comm)


def shutdown() -> None:
    """Leaves the world. Not collective, and does not wait for anybody.

    What is pending fails; what others then want of this rank fails there, saying that it has left.
    `init` works again afterwards, if all ranks call it. Runs by itself when the process ends.
    """
    global active
    world, active = active, None
    if world is not None:
        _core.close_on_exit(None)
        world.engine.close()


def _leave_for_good() -> None:
    """Closes the engine just before MPI is finalized."""
    if active is not None:
        active.engine.close(True)


def is_initialized() -> bool:
    """Whether there is a world: after `init`, before `shutdown`."""
    return active is not None


def rank() -> int:
    """This process's number in the world, from 0. ValueError before `init`."""
    return current().rank


def size() -> int:
    """The number of ranks in the world. ValueError before `init`."""
    return current().size


def local_rank() -> int:
    """This process's number on its host, from 0. ValueError before `init`."""
    return current().layout.local_rank


def local_size() -> int:
    """The number of ranks on this host. ValueError before `init`."""
    return current().layout.local_size


def cross_rank() -> int:
    """This process's number among the ranks with its local rank. ValueError before `init`."""
    return current().layout.cross_rank


def cross_size() -> int:
    """The number of ranks with this local rank, one per host. ValueError before `init`."""
    return current().layout.cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks. ValueError before `init`."""
    return current().layout.homogeneous


def _world_of_one(config: Config) -> World:
    layout = Layout(0, ((0,),), (socket.gethostname(),))
    engine = _engine(config, layout, -1, None, True)
    _pin([gpu.visible_devices(config.gpu)], 0, config)
    return World(layout, engine, config, None)


def _world_of_many(config: Config, comm: Intracomm | Sequence[int] | None) -> World:
    global _exits
    started = mpi.load()
    mpi.check_launcher(started, os.environ)
    given = mpi.world_comm(started, comm)
    # One for Python's exchanges, one for the engine alone: a message of the one is never taken for
    # one of the other. Not freed by shutdown, which is not collective.
    exchange, engine_comm = given.Dup(), given.Dup()
    if _exits is None:
        _exits = Exits(started, exchange, exchange.Get_rank())
        _exits.before(_leave_for_good)
        os.environ["HVDLITE_RANK_PROCESS"] = mpi.rank_process(os.environ)
    layout = mpi.layout_of(started, exchange, config.host_ranks)
    local = exchange.Split(layout.host, layout.rank)
    _check_settings(exchange, config)
    hosts, memory_fd = _share(config, exchange, local, layout)
    try:
        shared = Layout(layout.rank, *hosts)
        several = len(shared.hosts) > 1
        threads_supported = started.threads_supported()
        if several and not threads_supported and layout.rank == 0:
            log.warning(
                "%s gives one thread at a time access: collectives make progress only inside "
                "poll() and synchronize()",
                started.version(),
            )
        engine = _engine(
            config,
            shared,
            memory_fd,
            started.wire(engine_comm) if several else None,
            threads_supported or not several,
        )
    finally:
        if memory_fd >= 0:
            os.close(memory_fd)
    if started.finalize:
        _core.close_on_exit(engine)
    _divide_cores(local)
    _pin(local.allgather(gpu.visible_devices(config.gpu)), layout.local_rank, config)
    local.Free()
    return World(layout, engine, config, started)


def _check_settings(everyone: Comm, config: Config) -> None:
    """Raises LaunchError, on every rank, where ranks have different values of what must be equal:
    they would cut the data differently."""
    sizes = ("inline", "block", "segment", "piece", "bucket", "first_bucket")
    names = [*(f"{size}_bytes" for size in sizes), "deterministic"]
    everyones = everyone.allgather([getattr(config, name) for name in names])
    for name, values in zip(names, zip(*everyones, strict=True), strict=True):
        for rank, value in enumerate(values):
            if value != values[0]:
                raise LaunchError(
                    f"HVDLITE_{name.upper()} is {value} on rank {rank} and {values[0]} on rank 0; "
                    "give all ranks the same (hvdrun passes exported variables to all)"
                )


def _engine(
    config: Config,
    layout: Layout,
    memory_fd: int,
    wire: dict[str, int] | None,
    progress_thread: bool,
) -> _core.Engine:
    return _core.Engine(
        rank=layout.rank,
        hosts=layout.hosts,
        host_names=layout.host_names,
        memory_fd=memory_fd,
        wire=wire,
        progress_thread=progress_thread,
        inline_bytes=config.inline_bytes,
        block_bytes=config.block_bytes,
        segment_bytes=config.segment_bytes,
        piece_bytes=config.piece_bytes,
        deterministic=config.deterministic,
        event_capacity=config.event_log,
    )


def _share(
    config: Config, everyone: Comm, local: Comm, layout: Layout
) -> tuple[tuple[tuple[tuple[int, ...], ...], tuple[str, ...]], int]:
    """The hosts as the engine sees them, and the descriptor of this host's memory (-1: none).

    Ranks of one host that can't share memory are hosts of one rank each for the engine.
    """
    descriptor: int | None = -1
    problem = None
    if layout.local_size > 1:
        size_bytes = _core.memory_bytes(layout.local_size, config.inline_bytes, config.block_bytes)
        try:
            descriptor = open_shared(local, size_bytes)
        except MemoryError as error:
            problem = str(error)
    answers = everyone.allgather((problem, descriptor is not None))
    problems = sorted({text for text, _ in answers if text})
    if problems:
        if descriptor is not None and descriptor >= 0:
            os.close(descriptor)
        raise LaunchError("; ".join(problems))
    hosts: list[tuple[int, ...]] = []
    names: list[str] = []
    for ranks, name in zip(layout.hosts, layout.host_names, strict=True):
        groups = [ranks] if answers[ranks[0]][1] else [(rank,) for rank in ranks]
        if len(groups) > 1 and layout.rank == ranks[0]:
            log.warning("the ranks on %s can't share memory: they send messages instead", name)
        hosts += groups
        names += [name] * len(groups)
    order = sorted(range(len(hosts)), key=lambda i: hosts[i][0])
    return (tuple(hosts[i] for i in order), tuple(names[i] for i in order)), (
        -1 if descriptor is None else descriptor
    )


def _divide_cores(local: Comm) -> None:
    """torch gets this rank's share of the cores, never more than it has already."""
    everyones = local.allgather(threads.own_cores())
    share = threads.threads_for(everyones, local.Get_rank())
    if not threads.chosen_by_user(os.environ) and torch.get_num_threads() > share:
        torch.set_num_threads(share)


def _pin(local: Sequence[gpu.Visible], local_rank: int, config: Config) -> None:
    choice = gpu.choose(local, local_rank, config.gpu)
    gpu.apply(choice)


def _set_log_level(config: Config) -> None:
    log.setLevel(LEVELS[config.log_level])


def _tell_child(parent: int) -> None:
    global _told_child
    if not _told_child:
        _told_child = True
        log.warning(
            "this process was started by a rank (process %d): it is a world of one here; "
            "unset HVDLITE_RANK_PROCESS if it should be a rank of a job of its own",
            parent,
        )


def _after_fork_in_child() -> None:
    if active is not None:
        active.forked()


os.register_at_fork(after_in_child=_after_fork_in_child)
