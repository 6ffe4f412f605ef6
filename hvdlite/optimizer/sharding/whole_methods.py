"""What a sharded optimizer does with all of its state and all gradients at once: state dicts,
clipping, and what GradScaler sees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hvdlite.collectives import allgather, allreduce
from hvdlite.ops import Max
from hvdlite.optimizer.gradient_optimizer import GradientOptimizer
from hvdlite.optimizer.sharding import norms
from hvdlite.optimizer.sharding.part_states import PartStates
from hvdlite.optimizer.sharding.scaling import groups_for_scaler, scaler_is_caller
from hvdlite.optimizer.sharding.update import Update


class WholeMethods(GradientOptimizer):
    """The part of `ShardedOptimizer` that looks at everything at once."""

    _hvdlite_update: Update
    _hvdlite_states: PartStates

    def state_dict(self) -> dict[str, Any]:
        """This rank's shard of the state: with the options of all parameter groups, the state of
        what this rank owns, and under "hvdlite_shard" what it is a shard of.

        Not collective. The tensors are the optimizer's own, not copies. `torch.save` writes it, and
        `torch.load` reads it with `weights_only=True` too, where hvdlite is imported. An optimizer
        that is not sharded raises an error when it is to load it.
        """
        return self._hvdlite_states.state_dict(self, super().state_dict)

    def full_state_dict(self) -> dict[str, Any]:
        """The state dict that the optimizer of one process has, on rank 0 (the first rank of the
        process set); {} on the others. Collective; blocks.

        In torch's own format, with tensors of the parameters' shapes in host memory. They are
        gathered one after the other, so that no rank but rank 0 needs memory for them.

        Raises:
            ValueError: The ranks' states do not belong together; on every rank.
            HorovodInternalError: It failed; on every rank.
        """
        return self._hvdlite_states.full_state_dict(self, super().state_dict)

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
        self._hvdlite_states.load_state_dict(self, state_dict, super().load_state_dict)

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

        def everyones(_: torch.Tensor) -> torch.Tensor:
            counted = [(i, grad) for i, grad, is_first in found if speaks and is_first]
            rows = norms.rows_of_norms(counted, float(norm_type))
            name = "DistributedOptimizer.clip_grad_norm_"
            return allgather(rows, name=name, process_set=shards.process_set)

        grads = [(index, grad) for index, grad, _ in found]
        params = [param for group in self.param_groups for param in group["params"]]
        return norms.clip_grad_norm_(
            grads, params, everyones, max_norm, norm_type, error_if_nonfinite
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups. A GradScaler that looks for gradients sees what this rank owns."""
        if self._hvdlite_update.shards.shard and scaler_is_caller():
            return self._groups_for_scaler()
        return vars(self)["param_groups"]  # type: ignore[no-any-return]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        vars(self)["param_groups"] = groups

    def _groups_for_scaler(self) -> list[dict[str, Any]]:
        # A GradScaler's step asks first, so that the step which it makes next counts as skipped
        # already: `_finish` would forget its gradients.
        if not self._hvdlite_reducer.has_communicated():
            self._finish()
        shards = self._hvdlite_update.shards
        device = next(
            param.device for group in vars(self)["param_groups"] for param in group["params"]
        )

        def largest_of_all(found: torch.Tensor) -> torch.Tensor:
            name = "DistributedOptimizer.found_inf"
            return allreduce(found, op=Max, name=name, process_set=shards.process_set)

        return groups_for_scaler(self._parts_with_grads(), device, largest_of_all)

    def _parts_with_grads(self) -> Iterator[torch.Tensor]:
        for _, grad, _ in self._hvdlite_update.owned_gradients(self._hvdlite_reducer):
            part = grad.detach()
            part.grad = grad
            yield part
