"""Which optimizers compute each element of a parameter by itself."""

from __future__ import annotations

import torch

_NAMES = "SGD Adam AdamW NAdam RAdam Adamax RMSprop Rprop Adagrad Adadelta ASGD"
_KNOWN = frozenset(getattr(torch.optim, name) for name in _NAMES.split())


def is_elementwise(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether an optimizer of this class updates an element of a parameter by nothing but this
    element's value, gradient and state: then a parameter can be cut anywhere.

    A subclass may do anything, so it counts only if it says so itself.
    """
    return kind in _KNOWN or vars(kind).get("hvdlite_elementwise") is True


def require_shardable(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError if parts of the update can't be left to other ranks."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS can't be sharded, nor train parameters of share_parameters: each of its steps "
            "computes with all parameters at once; use it with shard=False and ordinary parameters"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(
            f"{type(optimizer).__name__} with differentiable=True can't be sharded, nor train "
            "parameters of share_parameters: autograd does not see how the other ranks update "
            "their parts; leave differentiable out"
        )
