"""What DistributedOptimizer's arguments must be: checked before anything is made of them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Sequence

import torch

from hvdlite.compression import Compression, Compressor
from hvdlite.ops import Adasum, Average, ReduceOp, Sum


def checked_op(op: object, predivide: float) -> ReduceOp:
    """Raises ValueError where gradients can't be combined so."""
    if not isinstance(op, ReduceOp) or op not in (Average, Sum, Adasum):
        raise ValueError(f"op={op!r}: gradients are combined by Average, Sum or Adasum")
    if isinstance(predivide, bool) or not isinstance(predivide, (int, float)):
        raise ValueError(f"gradient_predivide_factor={predivide!r}: expected a number")
    if not 0 < predivide <= sys.float_info.max:
        raise ValueError(
            f"gradient_predivide_factor={predivide!r:.40}: expected a number greater than 0 that a "
            "float64 holds"
        )
    if predivide != 1.0 and op is not Average:
        raise ValueError(
            f"gradient_predivide_factor={predivide!r} is for op=Average only, and op={op!r}"
        )
    return op


def checked_compression(compression: object) -> type[Compressor]:
    """Raises ValueError where it is none of Compression's: gradients are only cast, and a user's
    own `compress` would not be called."""
    for known in (Compression.none, Compression.fp16, Compression.bf16):
        if compression is known:
            return known
    raise ValueError(
        f"compression={compression!r}: expected Compression.none, Compression.fp16 or "
        "Compression.bf16; allreduce takes others too"
    )


def checked_passes(passes: object) -> int:
    """Raises ValueError where it is not a whole number from 1."""
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ValueError(
            f"backward_passes_per_step={passes!r}: expected a whole number, at least 1"
        )
    return passes


class ParameterNames:
    """What the user calls the parameters, also of those that come later."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        # The id of one that is gone may become another's, on some ranks only.
        self._names = {id(param): (weakref.ref(param), name) for name, param in named}

    def of(self, param: torch.Tensor, index: int) -> str:
        """index: which of the optimizer's it is."""
        reference, name = self._names.get(id(param), (None, ""))
        return name if reference and reference() is param else f"parameter {index}"


def checked_names(
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None, params: Sequence[torch.Tensor]
) -> ParameterNames:
    """The parameters' names.

    Raises:
        ValueError: what was given does not name each parameter once.
    """
    named = list(named_parameters or ())
    if not named:
        return ParameterNames((f"parameter {i}", param) for i, param in enumerate(params))
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in named):
        raise ValueError(
            "named_parameters: expected (name, parameter) tuples, as model.named_parameters() gives"
        )
    seen: set[str] = set()
    duplicates = sorted({name for name, _ in named if name in seen or seen.add(name)})  # type: ignore[func-returns-value]
    if duplicates:
        raise ValueError(f"named_parameters: more than one parameter is named {duplicates}")
    known = {id(param) for _, param in named}
    missing = sum(id(param) not in known for param in params)
    if missing:
        raise ValueError(
            f"named_parameters: {missing} of the optimizer's {len(params)} parameters are not "
            "named; pass model.named_parameters() of the whole model, or nothing"
        )
    return ParameterNames(named)


def groups_by_id(
    groups: int | Sequence[Sequence[torch.Tensor]] | None,
    num_groups: int,
    params: Sequence[torch.Tensor],
) -> dict[int, int]:
    """The number of each parameter's group, by the parameter's id; those without are left out.

    Raises:
        ValueError: Both arguments are given; a number that is not positive; a parameter in two
            groups, or one that the optimizer does not have.
    """
    if isinstance(num_groups, bool) or not isinstance(num_groups, int) or num_groups < 0:
        raise ValueError(f"num_groups={num_groups!r}: expected a whole number, at least 0")
    if groups is None:
        return _divided(num_groups, params) if num_groups else {}
    if num_groups:
        raise ValueError(
            f"num_groups={num_groups} and groups are both given; leave num_groups, its older form"
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
            where = f"groups: the parameter {position} of group {number}"
            if id(param) in group_of:
                raise ValueError(f"{where} is in more than one group")
            if id(param) not in known:
                raise ValueError(f"{where}, {list(param.shape)}, is not one of the optimizer's")
            group_of[id(param)] = number
    return group_of


def _divided(groups: int, params: Sequence[torch.Tensor]) -> dict[int, int]:
    """So many groups of parameters that follow each other, alike in size but for one more."""
    each, more = divmod(len(params), groups)
    sizes = [each + (number < more) for number in range(groups)]
    numbers = [number for number, size in enumerate(sizes) for _ in range(size)]
    return {id(param): number for param, number in zip(params, numbers, strict=True)}
