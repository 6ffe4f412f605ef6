"""An optimizer as worker 0 describes it to the servers, which each build it for their parts.

Also cuts the optimizer's state along with the parameters, and puts it together again.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvdlite.asynchronous.parts import Part
from hvdlite.optimizer.sharding.elementwise import is_elementwise

# A scheduler puts these among an optimizer's attributes.
_OF_SCHEDULERS = {"step", "_opt_called"}

State = list[dict[str, Any]]


def can_be_cut(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its parameters can be cut along the first dimension."""
    return type(optimizer) is torch.optim.SparseAdam or is_elementwise(type(optimizer))


@dataclass(frozen=True)
class OptimizerSpec:
    """kind: Its class. base: What torch would pickle of it, without parameters and state.
    attributes: Those that its class adds. options: Of each parameter group."""

    kind: type[torch.optim.Optimizer]
    base: dict[str, Any]
    attributes: dict[str, Any]
    options: list[dict[str, Any]]

    def build(self, params_by_group: Sequence[list[torch.Tensor]]) -> torch.optim.Optimizer:
        """The optimizer, with other parameters in its groups, and without state."""
        groups = [
            {**options, "params": params}
            for options, params in zip(self.options, params_by_group, strict=True)
        ]
        optimizer = self.kind.__new__(self.kind)
        base = {**self.base, "state": collections.defaultdict(dict), "param_groups": groups}
        optimizer.__setstate__(base)
        vars(optimizer).update(self.attributes)
        return optimizer


def describe(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    """optimizer: not wrapped."""
    of_base = vars(torch.optim.Optimizer([torch.zeros(1)], {})).keys()
    base = {
        name: value
        for name, value in optimizer.__getstate__().items()
        if name not in ("state", "param_groups")
    }
    attributes = {
        name: value
        for name, value in vars(optimizer).items()
        if name not in of_base and name not in base and name not in _OF_SCHEDULERS
    }
    return OptimizerSpec(type(optimizer), base, attributes, options_of(optimizer))


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of each group, of this moment. A learning rate that is a tensor becomes a number:
    it may lie on a device, and change in place."""
    return [
        {
            name: value.item() if isinstance(value, torch.Tensor) and not value.dim() else value
            for name, value in group.items()
            if name not in ("params", "param_names")
        }
        for group in optimizer.param_groups
    ]


def state_of(state: Mapping[Any, Any], key: Any, part: Part, shape: Sequence[int]) -> Any:
    """The state of a part, out of that of its parameter (found in `state` by `key`).

    What has the parameter's shape is cut as this is; all else each part has alike.
    """
    return {
        name: part.of(value).detach().cpu().clone()
        if isinstance(value, torch.Tensor) and value.shape == torch.Size(shape)
        else value.detach().cpu().clone()
        if isinstance(value, torch.Tensor)
        else value
        for name, value in state.get(key, {}).items()
    }


def whole_state(pieces: Sequence[tuple[Part, Mapping[str, Any]]]) -> dict[str, Any]:
    """The state of a parameter, out of those of its parts, which are in the order of their rows."""
    if len(pieces) == 1:
        return dict(pieces[0][1])
    whole: dict[str, Any] = {}
    for part, state in pieces:
        for name, value in state.items():
            if name in whole:
                continue
            if isinstance(value, torch.Tensor) and value.shape == torch.Size(part.shape):
                # A part that never got a gradient has no state yet.
                whole[name] = torch.cat(
                    [
                        its[name] if name in its else torch.zeros(p.shape, dtype=value.dtype)
                        for p, its in pieces
                    ]
                )
            else:
                whole[name] = value
    return whole
