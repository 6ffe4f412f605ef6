"""Keeps torch's own clipping away from parameters whose gradients are sharded: `.grad` is None
there, so that it would find nothing to clip and say nothing."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.utils.weak import WeakTensorKeyDictionary

# In torch before 2.6 there is no _clip_grads_with_norm_ (torch.nn.utils.clip_grads_with_norm_).
_GUARDED = ("clip_grad_norm_", "clip_grad_value_", "_clip_grads_with_norm_")

# By a parameter, the object that shards its gradients. A parameter is guarded while both are alive.
_owners: Any = WeakTensorKeyDictionary()


def guard(params: Iterable[torch.Tensor], owner: object) -> None:
    """From now on torch's clipping functions raise an error for these parameters, while `owner`
    lives and until `release`."""
    _install()
    for param in params:
        _owners[param] = weakref.ref(owner)


def release(params: Iterable[torch.Tensor]) -> None:
    """Lets torch's functions clip these parameters again."""
    for param in params:
        _owners.pop(param, None)


def is_guarded(param: object) -> bool:
    owner = _owners.get(param) if isinstance(param, torch.Tensor) else None
    return owner is not None and owner() is not None


@functools.cache
def _install() -> None:
    for name in _GUARDED:
        function = getattr(clip_grad, name, None)
        cell = _cell_of_inner(function)
        if cell is not None:
            # Every name that a program has imported leads to this cell, whenever it did so.
            cell.cell_contents = _guarded(cell.cell_contents, name.lstrip("_"))
        elif function is not None:
            replacement = _guarded(function, name.lstrip("_"))
            for module in (clip_grad, torch.nn.utils):
                for alias, value in list(vars(module).items()):
                    if value is function:
                        setattr(module, alias, replacement)


def _cell_of_inner(function: Any) -> Any:
    """torch's functions are closures that call another one under no_grad: the variable with it."""
    inner = getattr(function, "__wrapped__", None)
    for cell in getattr(function, "__closure__", None) or ():
        if inner is not None and cell.cell_contents is inner:
            return cell
    return None


def _guarded(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    by_value = ", or clip optimizer.sharded_grad(param).clamp_(-value, value)"

    @functools.wraps(function)
    def guarded(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if any(map(is_guarded, given)):
            raise RuntimeError(
                f"torch.nn.utils.{name} can't clip these parameters: their gradients are sharded "
                "by DistributedOptimizer(shard=...), so .grad is None, and each rank has parts "
                "only. Call the optimizer's clip_grad_norm_(max_norm) instead, on every rank"
                + (by_value if "value" in name else "")
            )
        # torch warns of an empty generator, and not of an empty list.
        is_generator = isinstance(parameters, types.GeneratorType)
        return function((param for param in given) if is_generator else given, *args, **kwargs)

    return guarded
