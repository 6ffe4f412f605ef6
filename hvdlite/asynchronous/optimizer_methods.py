"""The methods of an asynchronous optimizer whose parameters live on servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch

from hvdlite.optimizer.wrapping import Wrapper
from hvdlite.world import world

Step = TypeVar("Step", bound=Callable[..., Any])


def _with_hooks(step: Step) -> Step:
    """Runs the user's hooks around a step, as torch does with those of its classes."""
    return cast("Step", torch.optim.Optimizer.profile_hook_step(step))


class AsyncMethods(Wrapper):
    """The methods that an asynchronous optimizer adds to its class."""

    # A Worker, or what does the same without servers.
    _hvdlite_worker: Any

    @_with_hooks
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Sends this worker's gradients, and goes on with parameters that are new enough.

        A step ends with the parameters changed as `max_staleness` says; it waits for other workers
        only as far as that needs them. A parameter without a gradient is left alone.

        Raises:
            HorovodInternalError: A server has failed, or a worker has died.
            ValueError: A closure is given, which can't be called again by a server.
        """
        self._hvdlite_refuse_closure(closure)
        self._hvdlite_worker.step(self)

    def _hvdlite_refuse_closure(self, closure: object) -> None:
        if closure is not None:
            raise ValueError(
                "AsyncOptimizer.step: a closure can't be used, as other workers change the "
                "parameters meanwhile; compute the loss and the gradients before, and call step() "
                "without it"
            )

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
        counters: dict[str, Any] = self._hvdlite_worker.counters()
        return counters

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
        options = self._hvdlite_worker.options_to_load(state_dict)
        if "param_groups" not in options:
            # On every worker, as the options are worker 0's.
            raise ValueError(
                "AsyncOptimizer.load_state_dict: rank 0's state dict has no 'param_groups'; give "
                "it there what optimizer.state_dict() has returned (full_state_dict() gives {} on "
                "all ranks but rank 0)"
            )
        super().load_state_dict({**options, "state": {}})
        self._hvdlite_worker.load_state(state_dict.get("state", {}))
        self.state.clear()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler divides the gradients itself, and skips a step by not calling it."""
        return False

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        pass
