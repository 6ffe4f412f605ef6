"""AsyncOptimizer: sends gradients to servers and does not wait for the other workers."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from hvdlite.asynchronous.arguments import (
    check_alike,
    check_without_servers,
    checked_optimizer,
    checked_partitioner,
    checked_replicas,
    checked_servers,
    checked_staleness,
    require_no_virtual_ranks,
)
from hvdlite.asynchronous.between_hosts import BetweenHostsWorker
from hvdlite.asynchronous.hogwild import HogwildMethods, HogwildWorker
from hvdlite.asynchronous.optimizer_methods import AsyncMethods
from hvdlite.asynchronous.partitioners import Partitioner
from hvdlite.asynchronous.worker import Worker
from hvdlite.collectives.objects import gather_results
from hvdlite.optimizer.arguments import checked_names
from hvdlite.optimizer.wrapping import wrap
from hvdlite.world import world
from hvdlite.world.teams.process_sets import global_process_set


def AsyncOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    max_staleness: int | None = None,
    servers: int | None = None,
    partitioner: Partitioner | None = None,
    sync_replicas: int | None = None,
) -> Any:
    """Makes an optimizer whose parameters live on servers: its `step` sends gradients and goes on.

    Start the job with servers: `hvdrun -np 6 --servers 2 python train.py` has four workers. The
    servers apply gradients in the order in which they come, each by a step of the optimizer that
    worker 0 passes here, with the sending worker's current options (learning rate, …). All workers
    start with the parameters of worker 0.

    Without servers the parameters move into memory that the workers of a host share, and each
    worker's step changes them there, by its own optimizer with its own state (Hogwild). On several
    hosts each part of the parameters has its home on one host, whose workers change it. The workers
    of other hosts send it their gradients; its first worker applies them in the background, with
    another optimizer.

    Every worker calls this, in the same order among such calls, with the same parameters. Blocks.

    Args:
        optimizer: Any torch optimizer whose step needs no closure. The partitioner can cut
            parameters of torch's element-wise ones (SGD, Adam, AdamW, NAdam, RAdam, Adamax,
            RMSprop, Rprop, Adagrad, Adadelta, ASGD, SparseAdam); others get whole ones. The
            optimizer's state moves to the servers.
        named_parameters: `model.named_parameters()`: names for error messages.
        max_staleness: s: the parameters with which a worker computes its step t contain the first
            t - s steps of every worker; so no worker is more than s steps ahead of the slowest one.
            0: all make each step together, with the mean of their gradients. None: no bound.
        servers: How many of the job's servers to use; None: all; 0: none.
        partitioner: Cuts large parameters, so that they spread over the servers: a
            FixedShardsPartitioner, MinSizePartitioner, MaxSizePartitioner, or any object with their
            method. None: each stays whole.
        sync_replicas: n: the workers make each step together, with the mean of the gradients of the
            n fastest ones; later gradients for that step are dropped. max_staleness is then 0 or
            None.

    Returns:
        An instance of the optimizer's own class, with the additional methods pull, synchronize,
        counters and full_state_dict. Schedulers and GradScaler accept it.

    Raises:
        ValueError: A bad argument; there are no servers, or too few;
            HVDLITE_DETERMINISTIC=virtual:V.
        HorovodInternalError: The workers' arguments differ, or a server can't build the optimizer;
            on every worker.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = hvd.AsyncOptimizer(  # doctest: +SKIP
        ...     optimizer, model.named_parameters(), max_staleness=3
        ... )
    """
    active = world.current()
    require_no_virtual_ranks(active)

    def check() -> dict[str, Any]:
        checked_optimizer(optimizer)
        names = checked_names(named_parameters, lambda: optimizer.param_groups)
        staleness = checked_staleness(max_staleness)
        replicas = checked_replicas(sync_replicas, staleness, active.size)
        chosen = checked_servers(servers, active)
        if not chosen:
            check_without_servers(active, staleness, replicas)
        return {
            "names": names,
            "servers": chosen,
            "partitioner": checked_partitioner(partitioner),
            "staleness": staleness,
            "replicas": replicas,
        }

    checked: dict[str, Any] = {}

    def words() -> list[Any]:
        checked.update(check())
        names = checked["names"]
        return [
            ("max_staleness", max_staleness),
            ("sync_replicas", sync_replicas),
            ("servers", list(checked["servers"])),
            ("partitioner", _described(partitioner)),
            ("optimizer", type(optimizer).__qualname__),
            *(
                (names.of(param, index), (number, str(param.dtype), list(param.shape)))
                for index, (number, param) in enumerate(
                    (number, param)
                    for number, group in enumerate(optimizer.param_groups)
                    for param in group["params"]
                )
            ),
        ]

    by_worker = gather_results(
        "AsyncOptimizer", words, "hvdlite.AsyncOptimizer", global_process_set
    )
    check_alike(by_worker)
    worker: Any
    if checked["servers"]:
        assert active.everyone is not None
        worker = Worker(active.everyone, optimizer, **checked)
        result = wrap(optimizer, AsyncMethods, _hvdlite_worker=worker)
    elif len(active.placement.hosts) > 1:
        worker = BetweenHostsWorker(
            optimizer, checked["names"], checked["staleness"], checked["partitioner"]
        )
        result = wrap(optimizer, AsyncMethods, _hvdlite_worker=worker)
    else:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        worker = HogwildWorker(params, checked["staleness"])
        result = wrap(optimizer, HogwildMethods, _hvdlite_worker=worker)
    weakref.finalize(result, worker.close).atexit = False
    return result


def _described(partitioner: Any) -> Any:
    return None if partitioner is None else (type(partitioner).__qualname__, vars(partitioner))
