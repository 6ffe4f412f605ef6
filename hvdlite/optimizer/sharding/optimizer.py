"""An optimizer of which each rank does a part of the update."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.optim import optimizer as torch_optimizer

from hvdlite.collectives.allgather import allgather
from hvdlite.collectives.allreduce import allreduce
from hvdlite.ops import Max
from hvdlite.optimizer.gradient_optimizer import GradientOptimizer
from hvdlite.optimizer.sharding import norms
from hvdlite.optimizer.sharding.part_states import PartStates, put
from hvdlite.optimizer.sharding.update import Update
from hvdlite.optimizer.sharding.words import NOTHING_REDUCED, closure_of_whole
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


class ShardedOptimizer(GradientOptimizer):
    """The methods that a distributed optimizer whose update is divided adds to its class."""

    _hvdlite_update: Update
    _hvdlite_states: PartStates

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
            raise RuntimeError(NOTHING_REDUCED)
        step = functools.partial(self._wrapped_step, *args, **kwargs)
        gradients = self._hvdlite_reducer.gradients
        with writing("optimizer.step", gradients.process_set):
            update.begin(self._hvdlite_reducer)
            result = self._with_own_parts(step)
            update.end(may_overlap=True)
        return result

    def _with_own_parts(self, step: Callable[[], Any]) -> Any:
        """Runs the wrapped step on what this rank owns. The user's hooks, which the wrapped step
        calls first and last, see the whole parameters."""
        update = self._hvdlite_update
        groups: list[dict[str, Any]] = vars(self)["param_groups"]
        whole = [group["params"] for group in groups]
        assert update.division is not None
        own = self._hvdlite_states.keys_by_group(update.division)
        before: Any = self._optimizer_step_pre_hooks
        after: Any = self._optimizer_step_post_hooks
        key = object()

        # A subclass's step calls that of its base inside, which runs the hooks again.
        depth = 0

        def enter(*_: Any) -> None:
            nonlocal depth
            depth += 1
            put(groups, own)

        def leave(*_: Any) -> None:
            nonlocal depth
            depth -= 1
            if not depth:
                put(groups, whole)
                # Hooks of the user may read the parameters that the groups hold.
                hooks = len(after) - 1 + len(torch_optimizer._global_optimizer_post_hooks)
                update.end_own(may_overlap=not hooks)

        try:
            before[key] = enter
            after[key] = leave
            after.move_to_end(key, last=False)
            return step()
        finally:
            put(groups, whole)
            before.pop(key, None)
            after.pop(key, None)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        super().zero_grad(*args, **kwargs)
        # A step that an exception has ended on this rank: the others wait for its end.
        self._hvdlite_update.end()

    def _replicates_state(self, param: torch.Tensor, index: int) -> bool:
        division = self._hvdlite_update.division
        return division is not None and index in division.undivided and not is_shared(param)

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
        return tuple(GradientPart(*each) for each in found)

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard of the state: with the options of all parameter groups, the state of
        what this rank owns, and under "hvdlite_shard" what it is a shard of.

        Not collective. The tensors are the optimizer's own, not copies. `torch.save` writes it, and
        `torch.load` reads it with `weights_only=True` too, where hvdlite is imported. An optimizer
        that is not sharded raises an error when it is to load it.
        """
        return self._hvdlite_states.state_dict(super().state_dict)

    def full_state_dict(self) -> dict[str, Any]:
        """The state dict that the optimizer of one process has, on rank 0 (the first rank of the
        process set); {} on the others. Collective; blocks.

        In torch's own format, with tensors of the parameters' shapes in host memory. They are
        gathered one after the other, so that no rank but rank 0 needs memory for them.

        Raises:
            ValueError: The ranks' states do not belong together; on every rank.
            HorovodInternalError: It failed; on every rank.
        """
        return self._hvdlite_states.full_state_dict(super().state_dict)

    def load_state_dict(self, state_dict: Any) -> None:
        """Takes this rank's part of a saved state.

        Args:
            state_dict: One of these, the same kind on every rank: what `full_state_dict` has given
                on rank 0, or the state dict of an optimizer that was not sharded, on every rank;
                this rank's own shard, from as many ranks as there are now; or a list of shards that
                have among them what this rank owns, such as those of all ranks, from any number of
                them.

        The next step moves the state to other ranks if they own some of it by then.

        Raises:
            ValueError: The state is of another optimizer or model; a shard of another rank or
                number of ranks; shards are missing. Nothing is loaded then.
        """
        self._hvdlite_states.load_state_dict(state_dict, super().load_state_dict)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """`torch.nn.utils.clip_grad_norm_` for all parameters of the optimizer. Collective; blocks.

        Between `backward` (after GradScaler's `unscale_`) and `step`, on every rank. It reduces
        gradients that are not reduced yet. The norm is that of one process: in the gradients'
        precision, with the last digits of a float32 where a parameter is in parts.

        Args:
            max_norm: Gradients are scaled down to this norm; smaller ones stay as they are.
            norm_type: The order of the norm; infinity, too.
            error_if_nonfinite: Whether a norm that is no finite number is an error.
            foreach: Accepted for torch's sake; changes nothing with `shard`.

        Returns:
            The norm before clipping: a tensor of no dimensions, the same bits on every rank.

        Raises:
            RuntimeError: The norm is not finite, with `error_if_nonfinite`; on every rank.
            HorovodInternalError: It failed; on every rank.
        """
        shards = self._hvdlite_update.shards
        if not shards.shard:
            return super().clip_grad_norm_(max_norm, norm_type, error_if_nonfinite, foreach)
        self._finish()
        found = list(self._hvdlite_update.owned_gradients(self._hvdlite_reducer))
        # Where each host's ranks share the update, those of the first host speak for all.
        speaks = shards.members[0] == 0
        params = [param for group in self.param_groups for param in group["params"]]
        order = float(norm_type)
        with torch.no_grad():
            counted = [(index, grad) for index, grad, is_first in found if speaks and is_first]
            name = "DistributedOptimizer.clip_grad_norm_"
            rows = norms.rows_of_norms(counted, order)
            rows = allgather(rows, name=name, process_set=shards.process_set)
            total = norms.total_norm(rows, params, order)
            if error_if_nonfinite and not bool(total.isfinite()):
                raise RuntimeError(
                    f"the norm of order {order:g} of all gradients is {total.item()}, so they "
                    "can't be clipped; error_if_nonfinite=False scales them all the same"
                )
            norms.scale_to(float(max_norm), total, [grad for _, grad, _ in found])
        return total

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups. A GradScaler that looks for gradients sees what this rank owns."""
        if self._hvdlite_update.shards.shard and _scaler_is_caller():
            return self._groups_for_scaler()
        return vars(self)["param_groups"]  # type: ignore[no-any-return]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        vars(self)["param_groups"] = groups

    def _groups_for_scaler(self) -> list[dict[str, Any]]:
        """What this rank owns, with its gradients; and one number more, whose gradient is 0, or
        infinity if some rank has a gradient that is not finite. So a GradScaler, which goes through
        this, unscales and looks for infinite gradients, decides on every rank alike. Collective."""
        # A GradScaler's step asks first, so that the step which it makes next counts as skipped
        # already: `_finish` would forget its gradients.
        if not self._hvdlite_reducer.has_communicated():
            self._finish()
        parts = []
        found = told = torch.zeros(1, device=vars(self)["param_groups"][0]["params"][0].device)
        for _, grad, _ in self._hvdlite_update.owned_gradients(self._hvdlite_reducer):
            part = grad.detach()
            part.grad = grad
            parts.append(part)
            found = found + ~torch.linalg.vector_norm(part, torch.inf).isfinite().to(found.device)
        name = "DistributedOptimizer.found_inf"
        process_set = self._hvdlite_update.shards.process_set
        found = allreduce(found, op=Max, name=name, process_set=process_set)
        told.grad = torch.where(found > 0, torch.inf, 0.0)
        return [{"params": [*parts, told]}]


def _scaler_is_caller() -> bool:
    """Whether the caller of the calling function is a GradScaler that looks for gradients."""
    return sys._getframe(2).f_code.co_name == "_unscale_grads_"
