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

# In torch before 2.6 there is no _clip_grads_with_norm_ (torch.nn.utils.clip_grads_with_norm_).
_GUARDED = ("clip_grad_norm_", "clip_grad_value_", "_clip_grads_with_norm_")

# By a parameter's id: the parameter and the object that shards its gradients. A parameter is
# guarded while both are alive.
_sharded: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[Any]]] = {}
_is_installed = False


def guard(params: Iterable[torch.Tensor], owner: object) -> None:
    """From now on torch's clipping functions raise an error for these parameters, while `owner`
    lives and until `release`."""
    _install()
    for param in params:
        key = id(param)
        _sharded[key] = (weakref.ref(param, functools.partial(_forget, key)), weakref.ref(owner))


def release(params: Iterable[torch.Tensor]) -> None:
    """Lets torch's functions clip these parameters again."""
    for param in params:
        _sharded.pop(id(param), None)


def is_guarded(param: object) -> bool:
    entry = _sharded.get(id(param))
    return entry is not None and entry[0]() is param and entry[1]() is not None


def _forget(key: int, reference: weakref.ref[torch.Tensor]) -> None:
    # The id may be that of a new parameter by now.
    if _sharded.get(key, (None,))[0] is reference:
        del _sharded[key]


def _install() -> None:
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    for name in _GUARDED:
        function = getattr(clip_grad, name, None)
        if function is None:
            continue
        cell = _cell_of_inner(function)
        if cell is not None:
            # Every name that a program has imported leads to this cell, whenever it did so.
            cell.cell_contents = _guarded(cell.cell_contents, name)
            continue
        replacement = _guarded(function, name)
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
    public = name.lstrip("_")

    @functools.wraps(function)
    def guarded(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(parameters, torch.Tensor):
            given = list(parameters)
            # torch warns of an empty generator, and not of an empty list.
            is_generator = isinstance(parameters, types.GeneratorType)
            parameters = (param for param in given) if is_generator else given
        else:
            given = [parameters]
        if any(map(is_guarded, given)):
            raise RuntimeError(
                f"torch.nn.utils.{public} can't clip these parameters: their gradients are sharded "
                "by DistributedOptimizer(shard=...), so .grad is None, and each rank has parts "
                "only. Call the optimizer's clip_grad_norm_(max_norm) instead, on every rank"
                + (
                    ", or clip optimizer.sharded_grad(param).clamp_(-value, value)"
                    if "value" in public
                    else ""
                )
            )
        return function(parameters, *args, **kwargs)

    return guarded
