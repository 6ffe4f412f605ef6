"""Which of an optimizer's parameters is which on another rank: by name, where all have names, else
by its place among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvdlite.collectives.differing_ranks import which_ranks
from hvdlite.errors import HorovodInternalError
from hvdlite.optimizer.wrapping import Wrapper


@dataclass(frozen=True)
class Described:
    """A parameter of one rank's optimizer."""

    group: int
    name: str | None
    shape: tuple[int, ...]

    def in_words(self) -> str:
        name = "without a name" if self.name is None else repr(self.name)
        return f"{name} {list(self.shape)} in parameter group {self.group}"


def described(optimizer: torch.optim.Optimizer) -> list[Described]:
    """Its parameters, in their order."""
    found: list[Described] = []
    for number, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [None] * len(group["params"])
        for param, name in zip(group["params"], names, strict=True):
            if name is None and isinstance(optimizer, Wrapper):
                name = optimizer._hvdlite_check.name_of(param, len(found))
                if name == f"parameter {len(found)}":
                    name = None
            found.append(Described(number, name, tuple(param.shape)))
    return found


def require_same(function: str, members: Sequence[list[Described]], ranks: Sequence[int]) -> None:
    """members: by member, its optimizer's parameters. ranks: by member, its world rank.

    Raises:
        HorovodInternalError: They are not the same parameters in the same groups; where some have
            no names, in the same order.
    """
    if all(map(_have_names, members)):
        members = [
            sorted(member, key=lambda each: (each.group, str(each.name))) for member in members
        ]
    else:
        members = [[Described(p.group, None, p.shape) for p in member] for member in members]
    for index in range(max(map(len, members))):
        found = [member[index].in_words() if index < len(member) else "none" for member in members]
        if words := which_ranks(found, ranks):
            raise HorovodInternalError(
                f"{function}: the optimizers differ: parameter {index} is {words}; on every rank "
                "make the optimizer over the same parameters in the same order, or give their "
                "names, as torch.optim.SGD(model.named_parameters(), ...) does"
            )


def in_order_of(
    own: Sequence[Described], theirs: Sequence[Described], state_dict: dict[str, Any]
) -> dict[str, Any]:
    """Another rank's state dict, with its parameters in the order that this rank's optimizer has.
    Both have been found to be the same."""
    if not (_have_names(own) and _have_names(theirs) and "param_groups" in state_dict):
        return state_dict
    groups = [dict(group) for group in state_dict["param_groups"]]
    for number, group in enumerate(groups):
        places = {each.name: i for i, each in enumerate(e for e in theirs if e.group == number)}
        order = [places[each.name] for each in own if each.group == number]
        for key in {"params", "param_names"} & group.keys():
            group[key] = [group[key][place] for place in order]
    return {**state_dict, "param_groups": groups}


def _have_names(params: Sequence[Described]) -> bool:
    names = {each.name for each in params}
    return None not in names and len(names) == len(params)
