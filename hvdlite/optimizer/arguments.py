"""Checks the arguments of DistributedOptimizer before they are used."""

from __future__ import annotations

import collections
import contextlib
import math
import numbers
import sys
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from hvdlite.compression import Compression, Compressor
from hvdlite.ops import Adasum, Average, ReduceOp, Sum

Groups = Callable[[], Sequence[dict[str, Any]]]


def checked_op(op: object, predivide: float) -> ReduceOp:
    """Raises ValueError if gradients can't be combined with these arguments."""
    if not isinstance(op, ReduceOp) or op not in (Average, Sum, Adasum):
        raise ValueError(f"op={op!r}: expected Average, Sum or Adasum")
    is_number = isinstance(predivide, (int, float)) and not isinstance(predivide, bool)
    if not (is_number and 0 < predivide <= sys.float_info.max):
        raise ValueError(
            f"gradient_predivide_factor={predivide!r:.40}: expected a number greater than 0 that "
            "fits into a float64"
        )
    if predivide != 1.0 and op is not Average:
        raise ValueError(f"gradient_predivide_factor={predivide!r} needs op=Average, got op={op!r}")
    return op


def checked_compression(compression: object) -> type[Compressor]:
    """Raises ValueError if it is not one of Compression's: gradients are only cast, so a user's own
    `compress` would not be called."""
    for known in (Compression.none, Compression.fp16, Compression.bf16):
        if compression is known:
            return known
    raise ValueError(
        f"compression={compression!r}: expected Compression.none, Compression.fp16 or "
        "Compression.bf16 (only allreduce accepts other compressors)"
    )


def checked_passes(passes: object) -> int:
    """Raises ValueError unless it is a whole number of at least 1."""
    return _checked_whole("backward_passes_per_step", passes, 1)


def _checked_whole(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: expected a whole number, at least {least}")
    return value


# Beyond these a product with a gradient could overflow or vanish in float32.
_LEAST_WEIGHT, _LARGEST_WEIGHT = 1e-9, 1e15


def checked_weight(weight: object, op: ReduceOp) -> float:
    """Raises ValueError unless it is a number that gradients can be multiplied by, and the op is
    Average."""
    if op is not Average:
        raise ValueError(
            f"set_weight({weight!r:.40}) needs op=Average, got op={op!r}, which forms no mean; "
            "leave out set_weight()"
        )
    number: Any = weight
    if isinstance(number, torch.Tensor) and number.numel() == 1:
        number = number.item()
    value = math.inf
    if not isinstance(number, bool) and isinstance(number, numbers.Real):
        with contextlib.suppress(OverflowError):
            value = float(number)
    if not (value == 0 or _LEAST_WEIGHT <= value <= _LARGEST_WEIGHT):
        raise ValueError(
            f"set_weight({weight!r:.40}): expected 0, or a number from {_LEAST_WEIGHT:g} to "
            f"{_LARGEST_WEIGHT:g}, as that of this rank's samples, or a tensor of one such number"
        )
    return value


def checked_shard(shard: object, op: ReduceOp) -> bool | str:
    """Raises ValueError unless it is True, False or "host", and goes with the reduce op."""
    if shard is not True and shard is not False and shard != "host":
        raise ValueError(f'shard={shard!r:.40}: expected True, False or "host"')
    if shard and op is Adasum:
        raise ValueError(
            f"shard={shard!r} does not go with op=Adasum, where every rank makes a step of its own "
            "with whole parameters; use op=Average or shard=False"
        )
    return "host" if shard == "host" else bool(shard)


def checked_free(free_gradients: object, op: ReduceOp) -> bool:
    """Raises ValueError unless it is True or False, and goes with the reduce op."""
    if free_gradients is not True and free_gradients is not False:
        raise ValueError(f"free_gradients={free_gradients!r:.40}: expected True or False")
    if free_gradients and op is Adasum:
        raise ValueError(
            "free_gradients=True does not go with op=Adasum, where gradients do not lie in "
            "buckets; call optimizer.zero_grad() after step(), which frees them there"
        )
    return free_gradients


def checked_overlap(
    model: object, shard: bool | str, params: Sequence[torch.Tensor]
) -> torch.nn.Module | None:
    """Raises ValueError unless it is None, or a model with some of the parameters, and `shard` is
    set."""
    if model is None:
        return None
    if not isinstance(model, torch.nn.Module):
        raise ValueError(
            f"overlap_forward={model!r:.40}: expected the model, a torch.nn.Module, or None"
        )
    if not shard:
        raise ValueError(
            f'overlap_forward={type(model).__name__} needs shard=True or shard="host"; with '
            f"shard={shard!r} every rank has all parameters when step() returns"
        )
    known = {id(param) for param in params}
    if not any(id(param) in known for param in model.parameters()):
        raise ValueError(
            f"overlap_forward={type(model).__name__}: the model has none of the optimizer's "
            f"{len(params)} parameters; pass the model whose forward reads them"
        )
    return model


class ParameterNames:
    """The user's names of the parameters; gives a name also to parameters added later."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]], groups: Groups) -> None:
        self._groups = groups
        # (A new parameter may get the id of a deleted one, and only on some ranks.)
        self._names: MutableMapping[torch.Tensor, str] = WeakTensorKeyDictionary()
        self._add(named)

    def of(self, param: torch.Tensor, index: int) -> str:
        """index: its index among the optimizer's parameters."""
        if param not in self._names:
            self._add(_torch_names(self._groups()))
        return self._names.get(param, f"parameter {index}")

    def _add(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, param in named:
            self._names.setdefault(param, name)


def checked_names(
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None, groups: Groups
) -> ParameterNames:
    """The names of an optimizer's parameters: those given, or else torch's own. groups: gives its
    current param_groups.

    Raises:
        ValueError: The argument does not name each parameter exactly once.
    """
    params = [param for group in groups() for param in group["params"]]
    if isinstance(named_parameters, torch.nn.Module):
        raise ValueError(
            f"named_parameters: got the model, a {type(named_parameters).__name__}; expected "
            "(name, parameter) tuples: pass model.named_parameters()"
        )
    named = list(named_parameters or _torch_names(groups()))
    if not named:
        unnamed = ((f"parameter {i}", param) for i, param in enumerate(params))
        return ParameterNames(unnamed, groups)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in named):
        raise ValueError(
            "named_parameters: expected (name, parameter) tuples, as model.named_parameters() gives"
        )
    count = collections.Counter(name for name, _ in named)
    duplicates = sorted(name for name in count if count[name] > 1)
    if duplicates:
        raise ValueError(f"named_parameters: several parameters have the same name: {duplicates}")
    known = {id(param) for _, param in named}
    missing = sum(id(param) not in known for param in params)
    if missing:
        raise ValueError(
            f"named_parameters: {missing} of the optimizer's {len(params)} parameters have no "
            "name; pass model.named_parameters() of the whole model, or leave the argument out"
        )
    return ParameterNames(named, groups)


def _torch_names(groups: Sequence[dict[str, Any]]) -> list[tuple[str, torch.Tensor]]:
    """The names that torch keeps in parameter groups, of SGD([("weight", weight), ...])."""
    return [
        pair
        for group in groups
        for pair in zip(group.get("param_names", ()), group["params"], strict=False)
    ]


def groups_by_id(
    groups: int | Sequence[Sequence[torch.Tensor]] | None,
    num_groups: int,
    params: Sequence[torch.Tensor],
) -> dict[int, int]:
    """By a parameter's id, the number of its group; parameters without a group are left out.

    Raises:
        ValueError: Both arguments are given; a number that is not positive; a parameter in two
            groups, or one that the optimizer does not have.
    """
    _checked_whole("num_groups", num_groups, 0)
    if groups is None:
        return _divided(num_groups, params) if num_groups else {}
    if num_groups:
        raise ValueError(
            f"num_groups={num_groups} and groups are both given; leave out num_groups, the older "
            "form of groups"
        )
    if isinstance(groups, int) and not isinstance(groups, bool) and groups > 0:
        return _divided(groups, params)
    if not isinstance(groups, (list, tuple)):
        raise ValueError(
            f"groups={groups!r}: expected a whole number, at least 1, or lists of parameters"
        )
    known = {id(param) for param in params}
    group_of: dict[int, int] = {}
    for number, members in enumerate(groups):
        if not isinstance(members, (list, tuple)) or not all(
            isinstance(param, torch.Tensor) for param in members
        ):
            raise ValueError(f"groups: group {number} is not a list of parameters")
        for position, param in enumerate(members):
            where = f"groups: parameter {position} of group {number}"
            if id(param) in group_of:
                raise ValueError(f"{where} is in more than one group")
            if id(param) not in known:
                raise ValueError(
                    f"{where} (shape {list(param.shape)}) is not a parameter of this optimizer"
                )
            group_of[id(param)] = number
    return group_of


def _divided(groups: int, params: Sequence[torch.Tensor]) -> dict[int, int]:
    """Splits the parameters in order into `groups` groups whose sizes differ by at most one."""
    each, more = divmod(len(params), groups)
    sizes = [each + (number < more) for number in range(groups)]
    numbers = [number for number, size in enumerate(sizes) for _ in range(size)]
    return {id(param): number for param, number in zip(params, numbers, strict=True)}
