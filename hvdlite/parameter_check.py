"""check_parameters: whether all ranks still have the same model, and which rank is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hvdlite.asynchronous.optimizer_methods import AsyncMethods
from hvdlite.optimizer.checks.same_values import Comparison, Entry, Kind
from hvdlite.optimizer.overlap import in_flight
from hvdlite.optimizer.replicated import options_in, state_in
from hvdlite.optimizer.wrapping import Wrapper
from hvdlite.world.teams.process_sets import ProcessSet, global_process_set, team_of

_FORM = "check_parameters"

Named = torch.nn.Module | Mapping[str, Any] | Iterable[tuple[str, Any]] | Iterable[torch.Tensor]


def check_parameters(
    model: Named,
    optimizer: torch.optim.Optimizer | None = None,
    buffers: bool = False,
    repair: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[str]:
    """Compares the parameters of all ranks, bit by bit, and an optimizer's state. Blocks.

    Every rank calls it, at the same place between two steps. If all are the same, it costs one pass
    over the values, and one small operation. A difference is an error on all ranks, with the same
    text: the first tensor that differs, the ranks that differ from the majority, the number of
    steps of a distributed optimizer, and the usual causes. Two ranks have no majority, so the text
    can't tell which is wrong.

    It compares tensors of every dtype, on every device, contiguous or not; all but sparse ones,
    those without memory (meta), and subclasses of torch.Tensor with their own behaviour (DTensor).
    It leaves out a rank that has joined.

    Args:
        model: A module, for its parameters; or a state dict, (name, tensor) pairs or tensors, of
            which all tensors are compared, a state dict's buffers too.
        optimizer: For its state, and the numbers among its options (lr). State that rightly differs
            is left out: with `shard` and for shared parameters that of parts, with op=Adasum all.
        buffers: Whether a module's buffers are compared too. BatchNorm's statistics rightly differ
            unless it is a SyncBatchNorm.
        repair: True: instead of an error, differing tensors are overwritten in place with the value
            of the lowest rank in the majority; without a majority, with that of the lowest rank.
            The first rank warns, with the same text.
        process_set: The ranks that take part.

    Returns:
        The names of the repaired tensors; empty if all was the same.

    Raises:
        ValueError: A bad argument; the other ranks raise HorovodInternalError.
        DifferenceError: The values differ. It is a HorovodInternalError with the attributes
            `tensor`, `ranks` (those that are wrong, if there is a majority) and `step`.
        HorovodInternalError: The ranks have tensors of other names, shapes or dtypes, or a
            different number of them; the text names the first.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        >>> hvd.check_parameters(model)
        []
    """
    team = team_of(_FORM, process_set)
    comparison = Comparison(_FORM, f"hvdlite.{_FORM}", team, process_set, bool(repair))
    steps = optimizer._steps_made() if isinstance(optimizer, Wrapper) else 0
    return comparison.run(lambda: _entries(model, optimizer, buffers), steps)


def _entries(model: Any, optimizer: Any, buffers: bool) -> list[Entry]:
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"{_FORM}: optimizer is {type(optimizer).__name__}, expected a torch.optim.Optimizer"
        )
    if isinstance(optimizer, AsyncMethods):
        raise ValueError(
            f"{_FORM}: the workers of an AsyncOptimizer rightly have different parameters; compare "
            "what its state_dict() gives"
        )
    is_module = isinstance(model, torch.nn.Module)
    if buffers and not is_module:
        raise ValueError(f"{_FORM}: buffers=True needs a module, got {type(model).__name__}")
    named = model.named_parameters() if is_module else _pairs(model)
    entries = [Entry(name, Kind.PARAMETER, tensor) for name, tensor in named]
    in_flight.wait_for([each.tensor for each in entries])
    if buffers:
        entries += [Entry(name, Kind.BUFFER, tensor) for name, tensor in model.named_buffers()]
    if optimizer is not None:
        names = {id(each.tensor): each.name for each in entries}

        def name_of(param: torch.Tensor, index: int) -> str:
            return names.get(id(param), f"parameter {index}")

        entries += [*state_in(optimizer, name_of), *options_in(optimizer)]
    return entries


def _pairs(given: Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(given, (str, torch.Tensor)) or not isinstance(given, Iterable):
        raise ValueError(
            f"{_FORM}: expected a module, a state dict, (name, tensor) pairs or tensors, got "
            f"{type(given).__name__}"
        )
    # Sorted: two ranks may have filled their dicts in different orders.
    items = (
        sorted(given.items(), key=lambda it: str(it[0])) if isinstance(given, Mapping) else given
    )
    found = []
    for index, item in enumerate(items):
        name, tensor = item if isinstance(item, tuple) and len(item) == 2 else (index, item)
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{_FORM}: {name!r} is {type(tensor).__name__}, expected a tensor")
        found.append((str(name), tensor))
    return found
