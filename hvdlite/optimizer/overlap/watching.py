"""Makes the modules of a model wait for the parameters that they read."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from hvdlite.optimizer.overlap import watched_parameters
from hvdlite.optimizer.overlap.watched_parameters import WatchedParameters


class Watching:
    """The modules of one model, and those that it gets later."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        # The modules that have been looked at for parameters in lists.
        self._known: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        # By id, the parameters in lists.
        self._held: dict[int, torch.Tensor] = {}

    def params(self) -> set[int]:
        """The ids of all parameters of the model that are read through watched modules alone."""
        if watched_parameters.is_compiled:
            return set()
        found: set[int] = set()
        others: set[int] = set(self._held)
        for module in self._model.modules():
            params: Any = module.__dict__.get("_parameters")
            if type(params) in (dict, collections.OrderedDict):
                params = WatchedParameters(params)
                module.__dict__["_parameters"] = params
            if type(params) is not WatchedParameters or isinstance(module, torch.nn.RNNBase):
                # A ScriptModule reads its parameters in C++; LSTM and its kin keep them in a list.
                others.update(map(id, module.parameters(recurse=False)))
                continue
            if module not in self._known:
                self._known.add(module)
                self._held.update((id(param), param) for param in _in_lists(module))
                others.update(self._held)
            found.update(map(id, dict.values(params)))
        return found - others


def _in_lists(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters among the module's other attributes, and in lists, tuples and dicts there."""
    for name, value in vars(module).items():
        if name == "_parameters":
            continue
        if isinstance(value, torch.nn.Parameter):
            yield value
        if isinstance(value, dict):
            value = value.values()
        if isinstance(value, (list, tuple, type({}.values()))):
            yield from (each for each in value if isinstance(each, torch.nn.Parameter))
