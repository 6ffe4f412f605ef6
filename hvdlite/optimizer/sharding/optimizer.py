"""An optimizer of which each rank does a part of the update."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.optim import optimizer as torch_optimizer

from hvdlite.optimizer.sharding.whole_methods import WholeMethods
from hvdlite.optimizer.sharding.words import closure_of_whole, nothing_reduced
from hvdlite.own_names import own_name
from hvdlite.shared import is_shared
from hvdlite.shared.check import writing


class GradientPart(NamedTuple):
    """What a rank has of a reduced gradient.

    begin, end: which elements, counted in the order of the parameter's memory; of a contiguous
        parameter, as `flatten()` counts them.
    grad: their gradients, of one dimension. Changing them in place changes what the step uses.
    """

    begin: int
    end: int
    grad: torch.Tensor


class ShardedOptimizer(WholeMethods):
    """The methods that a distributed optimizer whose update is divided adds to its class."""

    def _update(self, is_reduced: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        update = self._hvdlite_update
        closure = kwargs.get("closure", args[0] if args else None)
        if callable(closure):
            if not update.shards.elementwise:
                raise ValueError(closure_of_whole(update.shards.kind.__name__))
            # It runs forward and backward, and may look at the parameters: not inside the step,
            # where these are views.
            with torch.enable_grad():
                loss = closure()
            if "closure" in kwargs:
                kwargs = {**kwargs, "closure": lambda: loss}
            else:
                args = (lambda: loss, *args[1:])
        elif not is_reduced:
            raise RuntimeError(nothing_reduced())
        step = functools.partial(self._wrapped_step, *args, **kwargs)
        gradients = self._hvdlite_reducer.gradients
        with writing("optimizer.step", gradients.process_set):
            update.begin(self._hvdlite_reducer)
            assert update.division is not None
            name = own_name(gradients.name, "state", "the exchange of the state of {}")
            self._hvdlite_states.follow(self, update.division, name)
            result = self._with_own_parts(step)
            update.end(may_overlap=True)
        return result

    def _with_own_parts(self, step: Callable[[], Any]) -> Any:
        """Runs the wrapped step on what this rank owns. The user's hooks, which the wrapped step
        calls first and last, see the whole parameters."""
        update = self._hvdlite_update
        groups: list[dict[str, Any]] = vars(self)["param_groups"]
        whole = [group["params"] for group in groups]
        own = update.own_by_group(groups)
        before: Any = self._optimizer_step_pre_hooks
        after: Any = self._optimizer_step_post_hooks
        key = object()

        def put(params: list[Any]) -> None:
            # In one call into C: no signal's exception finds half of it done.
            collections.deque(map(dict.__setitem__, groups, itertools.repeat("params"), params), 0)

        # A subclass's step calls that of its base inside, which runs the hooks again.
        depth = 0

        def enter(*_: Any) -> None:
            nonlocal depth
            depth += 1
            put(own)

        def leave(*_: Any) -> None:
            nonlocal depth
            depth -= 1
            if not depth:
                put(whole)
                # Hooks of the user may read the parameters that the groups hold.
                hooks = len(after) - 1 + len(torch_optimizer._global_optimizer_post_hooks)
                update.end_own(may_overlap=not hooks)

        try:
            before[key] = enter
            after[key] = leave
            after.move_to_end(key, last=False)
            return step()
        finally:
            put(whole)
            before.pop(key, None)
            after.pop(key, None)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        super().zero_grad(*args, **kwargs)
        # A step that an exception has ended on this rank: the others wait for its end.
        self._hvdlite_update.end()

    def _replicates_state(self, param: torch.Tensor, index: int) -> bool:
        division = self._hvdlite_update.division
        if division is None or is_shared(param):
            return False
        return all(part.index != index for parts in division.cut for part in parts)

    def wait_for_parameters(self) -> None:
        self._hvdlite_update.wait_for_parameters()

    def sharded_grad(self, param: torch.Tensor) -> tuple[GradientPart, ...]:
        """What this rank has of the reduced gradient of a parameter, between the backward that has
        reduced it and the step.

        With `shard`, `.grad` is None then. A part lies in memory that the next step and the next
        backward use again: clone what is to be kept. Not collective.

        Returns:
            Its parts, ascending: none where other ranks own all of it, or where no rank has a
            gradient; on one host at most one; on several hosts one for each piece of the bucket.

        Raises:
            ValueError: Not a parameter of this optimizer.

        Example:
            >>> for part in optimizer.sharded_grad(model.weight):
            ...     part.grad.clamp_(-1.0, 1.0)  # elements part.begin to part.end - 1
        """
        found = self._hvdlite_update.gradients_of(self._hvdlite_reducer, param)
        return tuple(itertools.starmap(GradientPart, found))
