"""Checks the arguments of AsyncOptimizer before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdlite.asynchronous.partitioners import Partitioner
from hvdlite.errors import HorovodInternalError
from hvdlite.optimizer.wrapping import Wrapper
from hvdlite.world.world import World


def checked_optimizer(optimizer: object) -> list[torch.Tensor]:
    """Its parameters. Raises ValueError if servers can't make its steps."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"AsyncOptimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    if isinstance(optimizer, Wrapper):
        raise ValueError(
            "AsyncOptimizer: this optimizer is already distributed or asynchronous; pass the "
            "ordinary one, and make a new one for each AsyncOptimizer"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "AsyncOptimizer: LBFGS computes the loss several times in a step, and servers can't; "
            "use DistributedOptimizer"
        )
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for index, param in enumerate(params):
        if param.layout is not torch.strided or param.is_meta or param.dtype.is_complex:
            raise ValueError(
                f"AsyncOptimizer: parameter {index} is {param.layout}, {param.dtype} on "
                f"{param.device}; expected dense real ones that have memory"
            )
    return params


def _whole_number(what: str, number: object, least: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise ValueError(
            f"AsyncOptimizer: {what}={number!r}, expected a whole number, at least {least}, or None"
        )
    return number


def checked_staleness(staleness: object) -> int | None:
    """Raises ValueError unless it is a number of steps, or None."""
    return None if staleness is None else _whole_number("max_staleness", staleness, 0)


def checked_replicas(replicas: object, staleness: int | None, num_workers: int) -> int | None:
    """How many workers' gradients make a step; None: each alone.

    Raises:
        ValueError: It is not a number of workers, or goes with a bound.
    """
    if replicas is None:
        return num_workers if staleness == 0 else None
    number = _whole_number("sync_replicas", replicas, 1)
    if number > num_workers:
        raise ValueError(
            f"AsyncOptimizer: sync_replicas={number}, but the job has {num_workers} workers"
        )
    if staleness:
        raise ValueError(
            f"AsyncOptimizer: sync_replicas={number} and max_staleness={staleness}: with "
            "sync_replicas all workers make each step together; leave out max_staleness"
        )
    return number


def require_no_virtual_ranks(active: World) -> None:
    """Raises ValueError with them."""
    if active.config.virtual_ranks:
        raise ValueError(
            f"AsyncOptimizer does not go with HVDLITE_DETERMINISTIC={active.config.deterministic}: "
            "it applies gradients in the order in which they come; use DistributedOptimizer"
        )


def checked_servers(servers: object, active: World) -> tuple[int, ...]:
    """The ranks of the servers to use.

    Raises:
        ValueError: The job has fewer.
    """
    there = active.everyone.roles.servers if active.everyone is not None else ()
    number = len(there) if servers is None else _whole_number("servers", servers, 0)
    if number > len(there):
        raise ValueError(
            f"AsyncOptimizer: servers={number}, but the job has {len(there)}; start it with "
            f"hvdrun -np {active.size + number} --servers {number}"
        )
    return there[:number]


def check_without_servers(active: World, staleness: int | None, replicas: int | None) -> None:
    """Raises ValueError if the workers can't do without servers."""
    start = f"start the job with hvdrun -np {active.size + 1} --servers 1"
    peers = active.team.peers
    if len(active.placement.hosts) > 1 and peers is not None and not peers.any_thread:
        raise ValueError(
            f"AsyncOptimizer: {peers.version()} lets only one thread at a time call it, and on "
            "several hosts a thread of each host's first worker applies the gradients of the other "
            "hosts; start MPI with MPI_THREAD_MULTIPLE"
        )
    if replicas is not None or staleness == 0:
        raise ValueError(
            "AsyncOptimizer: without servers the workers make no steps together (max_staleness=0, "
            f"sync_replicas); {start}, or use DistributedOptimizer"
        )
    if active.config.check_shared:
        raise ValueError(
            "AsyncOptimizer: HVDLITE_CHECK_SHARED=1 finds changes of shared parameters, which is "
            f"what workers without servers do; unset it, or {start}"
        )


def checked_partitioner(partitioner: Any) -> Partitioner | None:
    """Raises ValueError unless it has a partitioner's method, or is None."""
    if partitioner is None or callable(getattr(partitioner, "num_parts", None)):
        return partitioner  # type: ignore[no-any-return]
    raise ValueError(
        f"AsyncOptimizer: partitioner={partitioner!r}, expected a FixedShardsPartitioner, "
        "MinSizePartitioner or MaxSizePartitioner"
    )


def check_alike(by_worker: Sequence[Sequence[tuple[str, Any]]]) -> None:
    """What the workers pass must be the same.

    by_worker: pairs of a word and a value. Raises HorovodInternalError, on every worker alike.
    """
    first = by_worker[0]
    for worker, words in enumerate(by_worker):
        for (name, value), (name_0, value_0) in zip(words, first, strict=False):
            if (name, value) != (name_0, value_0):
                raise HorovodInternalError(
                    f"AsyncOptimizer: worker {worker} passes {name} {value}, worker 0 passes "
                    f"{name_0} {value_0}; pass the same on every worker"
                )
        if len(words) != len(first):
            raise HorovodInternalError(
                f"AsyncOptimizer: worker {worker} passes {len(words)} parameters and arguments, "
                f"worker 0 passes {len(first)}; pass the same on every worker"
            )
