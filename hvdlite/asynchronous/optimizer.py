"""AsyncOptimizer: sends gradients to servers and does not wait for the other workers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from hvdlite.asynchronous.arguments import (
    check_alike,
    checked_optimizer,
    checked_partitioner,
    checked_replicas,
    checked_servers,
    checked_staleness,
)
from hvdlite.asynchronous.partitioners import Partitioner
from hvdlite.asynchronous.worker import Worker
from hvdlite.collectives.objects import gather_results
from hvdlite.optimizer.arguments import checked_names
from hvdlite.optimizer.wrapping import Wrapper, wrap
from hvdlite.world import world
from hvdlite.world.process_sets import global_process_set


class AsyncMethods(Wrapper):
    """The methods that an asynchronous optimizer adds to its class."""

    _hvdlite_worker: Worker

    @torch.optim.Optimizer.profile_hook_step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Sends this worker's gradients, and goes on with parameters that are new enough.

        A step ends with the parameters changed as `max_staleness` says; it waits for other workers
        only as far as that needs them. A parameter without a gradient is left alone.

        Raises:
            HorovodInternalError: A server has failed, or a worker has died.
            ValueError: A closure is given, which can't be called again by a server.
        """
        if closure is not None:
            raise ValueError(
                "AsyncOptimizer.step: a closure can't be used, as the step is made by servers; "
                "compute the loss and the gradients before, and call step() without it"
            )
        self._hvdlite_worker.step(self)

    def pull(self) -> None:
        """Loads the newest parameters from the servers: with everything that this worker has sent.

        Not collective; does not wait for other workers.

        Raises:
            HorovodInternalError: A server has failed, or a worker has died.
        """
        self._hvdlite_worker.pull()

    def synchronize(self) -> None:
        """Returns when the servers have applied everything that this worker has sent.

        Not collective. In steps that are made together, what is sent is applied by `step`.
        """
        self._hvdlite_worker.synchronize()

    def counters(self) -> dict[str, Any]:
        """What has happened so far: `steps`, those of each worker; `dropped`, the gradients that
        came too late for their step (`sync_replicas`).

        Not collective; asks a server.

        Example:
            >>> optimizer.counters()  # doctest: +SKIP
            {'steps': [120, 118], 'dropped': 0}
        """
        found = self._hvdlite_worker.links[0].look()
        return {"steps": found["made"], "dropped": found["dropped"]}

    def add_param_group(self, *args: Any, **kwargs: Any) -> None:
        """Refused: the servers have their parameters from the beginning.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "AsyncOptimizer: parameters can't be added; call add_param_group of the optimizer "
            "before you make it asynchronous"
        )

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, in torch's own format, from the servers; so it loads into an
        ordinary optimizer. Not collective.

        Parameters are not in it: `pull()`, then `model.state_dict()`.
        """
        options = super().state_dict()
        return {**options, "state": self._hvdlite_worker.full_state()}

    def full_state_dict(self) -> dict[str, Any]:
        """`state_dict()` on rank 0, {} on the others, which ask nobody. Not collective."""
        return self.state_dict() if world.rank() == 0 else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Gives the servers an optimizer's state, and the values that the parameters of rank 0 have
        now: load the model before. Every worker calls it; rank 0's argument counts. Blocks.

        Raises:
            ValueError: It does not fit this optimizer.
            HorovodInternalError: It failed on rank 0.
        """
        super().load_state_dict({**state_dict, "state": {}})
        self._hvdlite_worker.load_state(state_dict["state"])
        self.state.clear()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler divides the gradients itself, and skips a step by not calling it."""
        return False

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        pass


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
    worker 0 passes here, with the options (learning rate, …) that the worker which sent them has at
    that moment. All workers start with the parameters of worker 0.

    Every worker calls this, in the same order among such calls, with the same parameters. Blocks.

    Args:
        optimizer: Any torch optimizer whose step needs no closure. Element-wise ones of torch
            (SGD, Adam, AdamW, NAdam, RAdam, Adamax, RMSprop, Rprop, Adagrad, Adadelta, ASGD,
            SparseAdam) can have parameters cut by the partitioner; others get whole ones. Its state
            moves to the servers.
        named_parameters: `model.named_parameters()`: names for error messages.
        max_staleness: s: the parameters with which a worker computes its step t contain the first
            t - s steps of every worker; so no worker is more than s steps ahead of the slowest one.
            0: all make each step together, with the mean of their gradients. None: no bound.
        servers: How many of the job's servers to use; None: all.
        partitioner: Cuts large parameters, so that they spread over the servers: a
            FixedShardsPartitioner, MinSizePartitioner, MaxSizePartitioner, or any object with their
            method. None: each stays whole.
        sync_replicas: n: the workers make each step together, with the mean of the gradients of the
            n fastest ones; what comes later for that step is dropped. max_staleness is 0 then, or
            None.

    Returns:
        An instance of the optimizer's own class, with the methods pull, synchronize, counters and
        full_state_dict besides. Schedulers and GradScaler take it.

    Raises:
        ValueError: A bad argument; there are no servers, or too few.
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

    def check() -> dict[str, Any]:
        params = checked_optimizer(optimizer)
        names = checked_names(named_parameters, params)
        staleness = checked_staleness(max_staleness)
        replicas = checked_replicas(sync_replicas, staleness, active.size)
        return {
            "names": names,
            "servers": checked_servers(servers, active),
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
    assert active.everyone is not None
    worker = Worker(active.everyone, optimizer, **checked)
    result = wrap(optimizer, AsyncMethods, _hvdlite_worker=worker)
    weakref.finalize(result, worker.close).atexit = False
    return result


def _described(partitioner: Any) -> Any:
    return None if partitioner is None else (type(partitioner).__qualname__, vars(partitioner))
