"""The logger `hvdlite`: its level, its lines on stderr, and what `init` says to it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from hvdlite.world.config import Config
from hvdlite.world.process import gpu_pinning
from hvdrun.for_hvdlite import KNOBS

if TYPE_CHECKING:
    from hvdlite.world.world import World

log = logging.getLogger("hvdlite")

LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}


class OnStderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Shows the lines that Python itself would not, where the script sets up no logging."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def set_level(config: Config) -> None:
    """Python itself shows lines from WARNING on, without their level."""
    level = LEVELS[config.log_level]
    log.setLevel(level)
    if level < logging.WARNING and not log.handlers:
        handler = OnStderr()
        handler.setFormatter(logging.Formatter("hvdlite: %(levelname)s: %(message)s"))
        log.addHandler(handler)


def describe(world: World) -> None:
    """Says what `init` has made: rank 0 what holds for all ranks, each rank what is its own."""
    if log.isEnabledFor(logging.INFO):
        if world.rank == 0:
            log.info("rank 0: %s", "; ".join(_of_all(world)))
            changed = ", ".join(_changed(world.config)) or "none"
            log.info("rank 0: settings that are not the defaults: %s", changed)
        log.info("rank %d: %s", world.rank, ", ".join(_of_this_rank(world)))
    if world.rank == 0 and world.table is not None:
        hosts = len(world.placement.hosts)
        rules = world.table.rules_for(max(hosts, 2))
        sizes = (f"{name} {_up_to(largest)}" for largest, name in rules)
        log.debug("rank 0: algorithms for %d hosts: %s", max(hosts, 2), ", ".join(sizes))


def _of_all(world: World) -> Iterable[str]:
    placement = world.placement
    hosts = zip(placement.host_names, placement.hosts, strict=True)
    where = ", ".join(f"{len(ranks)} on {name}" for name, ranks in hosts)
    yield f"a world of {world.size} rank{'s' * (world.size > 1)} ({where})"
    yield "without MPI" if world.mpi_runtime is None else world.mpi_runtime.version()


def _changed(config: Config) -> Iterable[str]:
    for knob in KNOBS:
        value = getattr(config, knob.name)
        if value != knob.default and not knob.internal:
            shown = value
            if isinstance(value, bool):
                shown = int(value)
            elif isinstance(value, tuple):
                shown = ",".join(map(str, value))
            yield f"{knob.variable}={shown}"


def _of_this_rank(world: World) -> Iterable[str]:
    yield f"process {os.getpid()} on {world.placement.host_names[world.placement.host]}"
    yield f"local rank {world.placement.local_rank} of {world.placement.local_size}"
    cores = len(os.sched_getaffinity(0))
    threads = torch.get_num_threads()
    yield f"{cores} CPU{'s' * (cores > 1)}, {threads} thread{'s' * (threads > 1)} of torch"
    yield _gpu(world.config)


def _gpu(config: Config) -> str:
    if gpu_pinning.refusal:
        return "no GPU, as the choice is not clear"
    if config.gpu == "none" or not torch.cuda.is_available():
        return "no GPU"
    return f"cuda:{torch.cuda.current_device()}"


def _up_to(largest: int | None) -> str:
    return "for larger ones" if largest is None else f"up to {largest} bytes"
