"""What must be the same on all ranks of an optimizer: parameters, options, and state that every
rank keeps in full."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from hvdlite.optimizer.checks.same_values import Entry, Kind
from hvdlite.optimizer.wrapping import Wrapper

NameOf = Callable[[torch.Tensor, int], str]


def parameters_in(optimizer: torch.optim.Optimizer, name_of: NameOf) -> Iterator[Entry]:
    """Its parameters. name_of: gives the name for a parameter and its index."""
    for index, param in enumerate(_params(optimizer)):
        yield Entry(name_of(param, index), Kind.PARAMETER, param)


def options_in(optimizer: torch.optim.Optimizer) -> Iterator[Entry]:
    """The numbers among the options of its parameter groups: learning rates, for instance."""
    for number, group in enumerate(optimizer.param_groups):
        for key in sorted(group.keys() - {"params"}, key=str):
            yield from _entries(f"{key} of parameter group {number}", Kind.OPTION, group, key)


def state_in(optimizer: torch.optim.Optimizer, name_of: NameOf) -> Iterator[Entry]:
    """The state that each rank has of its own accord, and in full, for each parameter."""
    for index, param in enumerate(_params(optimizer)):
        if isinstance(optimizer, Wrapper) and not optimizer._replicates_state(param, index):
            continue
        state = optimizer.state.get(param)
        if state:
            for key in sorted(state, key=str):
                name = f"{key} of {name_of(param, index)}"
                yield from _entries(name, Kind.STATE, state, key)


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _entries(name: str, kind: Kind, container: Any, key: Any) -> Iterator[Entry]:
    """For the tensors and numbers in `container[key]`, also in containers inside."""
    value = container[key]
    if isinstance(value, torch.Tensor):
        yield Entry(name, kind, value)
    elif isinstance(value, dict):
        for each in sorted(value, key=str):
            yield from _entries(f"{each} in {name}", kind, value, each)
    elif isinstance(value, list):
        for index in range(len(value)):
            yield from _entries(f"[{index}] of {name}", kind, value, index)
    else:
        found = value if isinstance(value, tuple) else (value,)
        tensor = _tensor_of(found)
        if tensor is not None:

            def put(changed: torch.Tensor) -> None:
                made = [_like(old, new) for old, new in zip(found, changed.tolist(), strict=True)]
                container[key] = tuple(made) if isinstance(value, tuple) else made[0]

            yield Entry(name, kind, tensor, put)


def _like(old: Any, new: float) -> Any:
    """`new` as old's type, where that holds it."""
    made = type(old)(new)
    return made if made == new else new


def _tensor_of(found: tuple[Any, ...]) -> torch.Tensor | None:
    """Python's numbers as a tensor; None if they are something else. A rank's 1 is another one's
    1.0: only integers that no float holds are kept as such."""
    if not found or not all(isinstance(each, (bool, int, float)) for each in found):
        return None
    whole = all(isinstance(each, int) and abs(each) < 1 << 63 for each in found)
    if whole and any(abs(each) > 1 << 53 for each in found):
        return torch.tensor([int(each) for each in found], dtype=torch.int64, device="cpu")
    return torch.tensor([float(each) for each in found], dtype=torch.float64, device="cpu")
