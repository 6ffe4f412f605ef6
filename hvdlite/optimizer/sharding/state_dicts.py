"""The state dicts of sharded optimizers: one rank's shard, marked as such, and what loads from it.

A rank that gets its own shard takes the cut that it was saved under; from all shards of a training,
or from the state dict of one process, it takes what its cut needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from hvdlite.optimizer.sharding.division import Division, Part
from hvdlite.optimizer.sharding.pieces import (
    MissingElements,
    Piece,
    State,
    Whole,
    by_index,
    part_of_state,
    recut,
    shaped_state,
)

MARK = "hvdlite_shard"
VERSION = 1


class ShardStateDict(dict[str, Any]):
    """The state of the elements that one rank owns: {"state", "param_groups", "hvdlite_shard"}.

    It loads into an optimizer that is sharded in the same way, and nothing else. Files hold the
    name of this class: it must stay where it is.
    """

    def copy(self) -> NoReturn:
        """Is what torch's `load_state_dict` does first."""
        mark = self.get(MARK, {})
        raise ValueError(
            f"this state dict is shard {mark.get('owner')} of {mark.get('owners')} of the state "
            f"of DistributedOptimizer({mark.get('optimizer')}, shard=...), and loads only into an "
            "optimizer that is sharded; for this one save what optimizer.full_state_dict() gives "
            "on rank 0 (for a shallow copy use dict(state_dict))"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardStateDict, (dict(self),)


# So that torch.load(weights_only=True) reads it.
torch.serialization.add_safe_globals([ShardStateDict])


@dataclass(frozen=True)
class Sharding:
    """How an optimizer's state is divided, and which part of it this rank has.

    optimizer: The name of the wrapped class.
    wholes: The parameters, through all groups.
    group_sizes: The number of parameters in each group.
    division: Of the state. Undivided parameters have a state that is not cut.
    owner: Whose shard it is, counted from 0.
    dealt_whole: The optimizer looks at whole tensors: each parameter has one part, and a state of
        any shape.
    in_hosts: The ranks of each host have all of the state among them; hosts may divide it in
        different ways.
    """

    optimizer: str
    wholes: tuple[Whole, ...]
    group_sizes: tuple[int, ...]
    division: Division
    owner: int
    dealt_whole: bool = False
    in_hosts: bool = False

    @property
    def owners(self) -> int:
        return len(self.division.cut)

    @property
    def steps(self) -> list[tuple[int, ...]]:
        return [whole.steps for whole in self.wholes]

    def mark(self) -> dict[str, Any]:
        """In types that torch.load(weights_only=True) reads."""
        return {
            "version": VERSION,
            "optimizer": self.optimizer,
            "owner": self.owner,
            "owners": self.owners,
            "cut": [_numbers(parts) for parts in self.division.cut],
            "portions": _numbers(self.division.own),
            "names": [whole.name for whole in self.wholes],
            "shapes": [list(whole.shape) for whole in self.wholes],
            "strides": [list(whole.stride) for whole in self.wholes],
            "group_sizes": list(self.group_sizes),
            "dealt_whole": self.dealt_whole,
            "undivided": sorted(self.division.undivided),
            "in_hosts": self.in_hosts,
        }

    @classmethod
    def of(cls, shard: Mapping[str, Any]) -> Sharding:
        """Raises ValueError for a version that this hvdlite does not know."""
        mark = shard[MARK]
        if mark.get("version") != VERSION:
            raise ValueError(
                f"the shard has version {mark.get('version')} of the format, and this hvdlite "
                f"reads version {VERSION}: load it with the hvdlite that saved it, and save "
                "optimizer.full_state_dict() there"
            )
        described = zip(mark["names"], mark["shapes"], mark["strides"], strict=True)
        # Shards that were saved before there were portions do not name them.
        portions = mark.get("portions") or mark["cut"][mark["owner"]]
        return cls(
            mark["optimizer"],
            tuple(Whole(name, tuple(shape), tuple(stride)) for name, shape, stride in described),
            tuple(mark["group_sizes"]),
            Division(
                tuple(map(_parts, mark["cut"])), frozenset(mark["undivided"]), _parts(portions)
            ),
            mark["owner"],
            mark["dealt_whole"],
            mark["in_hosts"],
        )


def shard_state_dict(
    sharding: Sharding, saved: Mapping[str, Any], states: Sequence[Mapping[str, Any]]
) -> ShardStateDict:
    """One rank's shard. The tensors in it are those of `states`, and not copies.

    saved: What the wrapped class saves, of which the options of the parameter groups are taken, and
        what the user has added. "params" are left out: a plain optimizer that gets them in some way
        or other has groups of another size, and raises an error.
    states: The state of each part of this owner; empty where there is none.
    """
    options = [{**group, "params": []} for group in saved["param_groups"]]
    state = {number: dict(state) for number, state in enumerate(states) if state}
    return ShardStateDict({**saved, "state": state, "param_groups": options, MARK: sharding.mark()})


def loaded(given: Any, own: Sharding) -> tuple[Division, list[dict[str, Any]], list[State]]:
    """What this rank takes from a state dict of one process, from its own shard, or from a list of
    shards that together have what it needs: whose parts these are (its own division, or that of its
    shard), the options of the parameter groups, and the state of each part, empty where there is
    none.

    Raises:
        ValueError: It is of another optimizer or model, another rank's shard, one of another
            number of them, or elements are missing.
    """
    division, first = own.division, given
    if isinstance(given, (list, tuple)) and given and all(map(_is_shard, given)):
        states, first = _from_shards(given, own), given[0]
    elif _is_shard(given):
        division, states = _from_own_shard(given, own)
    elif isinstance(given, Mapping):
        states = _from_full(given, own)
    else:
        raise ValueError(
            f"load_state_dict({type(given).__name__}): expected what optimizer.state_dict() or "
            "full_state_dict() has returned, or a list of the first, from all ranks"
        )
    options = [dict(group) for group in first["param_groups"]]
    for group in options:
        group.pop("params", None)
    return division, options, states


def _from_full(given: Mapping[str, Any], own: Sharding) -> list[State]:
    if "param_groups" not in given or "state" not in given:
        raise ValueError(
            "load_state_dict: the state dict has no 'state' and 'param_groups' (full_state_dict() "
            "gives {} on all ranks but rank 0: give every rank what rank 0 has got)"
        )
    keys = [group["params"] for group in given["param_groups"]]
    _check_group_sizes(tuple(map(len, keys)), own)
    ids = [key for group_keys in keys for key in group_keys]
    states: list[State] = []
    for part in own.division.own:
        state = given["state"].get(ids[part.index], {})
        if not own.dealt_whole:
            state = part_of_state(state, own.wholes[part.index], part.begin, part.end)
        states.append(dict(state))
    return states


def _from_own_shard(given: Mapping[str, Any], own: Sharding) -> tuple[Division, list[State]]:
    saved = Sharding.of(given)
    _check_model(saved, own)
    of_all = (
        f"on every rank, give load_state_dict a list of the shards of all {saved.owners} owners, "
        "optimizer.load_state_dict([torch.load(file) for file in files])"
    )
    if saved.owners != own.owners:
        raise ValueError(
            f"the shard is one of {saved.owners}, and here {_counted(own.owners, 'rank')} "
            f"share the state: {of_all}"
        )
    if saved.owner != own.owner:
        raise ValueError(
            f"the shard is that of owner {saved.owner} of {saved.owners}, and this rank is owner "
            f"{own.owner} (counted from 0): load the file that this rank has saved"
        )
    if saved.steps != own.steps:
        raise ValueError(
            "the parameters lay in memory in another order (memory_format) when the shard was "
            f"saved: {of_all}"
        )
    return saved.division, [dict(state) for _, state in _pieces(given, saved)]


def _from_shards(given: Sequence[Mapping[str, Any]], own: Sharding) -> list[State]:
    marks = [Sharding.of(shard) for shard in given]
    first = marks[0]
    for saved in marks:
        _check_model(saved, own)
        is_alike = saved.division.cut == first.division.cut or (saved.in_hosts and first.in_hosts)
        if not is_alike or saved.steps != first.steps:
            raise ValueError(
                f"these shards were not saved together: one has {_counted(first.owners, 'owner')}"
                f", another {saved.owners}, or they divide the parameters in different ways"
            )
    pieces = by_index(
        piece for shard, saved in zip(given, marks, strict=True) for piece in _pieces(shard, saved)
    )
    states = []
    for part in own.division.own:
        try:
            states.append(_state_of(part, pieces.get(part.index, []), first, own))
        except MissingElements as missing:
            gap = Part(part.index, missing.begin, missing.end)
            lacking = [
                owner
                for owner, parts in enumerate(first.division.cut)
                if any(each.common(gap) for each in parts)
            ]
            there = ", ".join(str(owner) for owner in sorted({saved.owner for saved in marks}))
            raise ValueError(
                f"{missing}: the shards given are those of the owners {there} of {first.owners}, "
                f"and owner {lacking[0] if lacking else 'unknown'} has them; give load_state_dict "
                "the shards of all owners"
            ) from None
    return states


def _state_of(part: Part, pieces: Sequence[Piece], saved: Sharding, own: Sharding) -> State:
    """The state of a part of this rank, from all the pieces of its parameter."""
    there, here = saved.wholes[part.index], own.wholes[part.index]
    if own.dealt_whole:
        if not pieces:
            raise MissingElements(there.name, part.begin, part.end)
        return dict(next((state for _, state in pieces if state), {}))
    if there.steps != here.steps:
        whole = shaped_state(recut(pieces, there, 0, there.numel), there)
        return part_of_state(whole, here, part.begin, part.end)
    return recut(pieces, there, part.begin, part.end)


def _is_shard(given: object) -> bool:
    return isinstance(given, Mapping) and MARK in given


def _pieces(shard: Mapping[str, Any], saved: Sharding) -> list[Piece]:
    """The parts of a shard with their states."""
    return [
        (part, shard["state"].get(number, {})) for number, part in enumerate(saved.division.own)
    ]


def _numbers(parts: Sequence[Part]) -> list[list[int]]:
    return [[part.index, part.begin, part.end] for part in parts]


def _parts(numbers: Sequence[Sequence[int]]) -> tuple[Part, ...]:
    return tuple(Part(*each) for each in numbers)


def _check_model(saved: Sharding, own: Sharding) -> None:
    if saved.optimizer != own.optimizer:
        raise ValueError(
            f"the shard is of the optimizer {saved.optimizer}, and this one is {own.optimizer}: "
            "load it into the optimizer that it was saved from"
        )
    _check_group_sizes(saved.group_sizes, own)
    for index, (there, here) in enumerate(zip(saved.wholes, own.wholes, strict=True)):
        # Those without names have a default one.
        default = f"parameter {index}"
        is_renamed = there.name != here.name and default not in (there.name, here.name)
        if is_renamed or there.shape != here.shape:
            raise ValueError(
                f"the shard is of another model: parameter {index} is {there.name!r} of shape "
                f"{list(there.shape)} there, and {here.name!r} of shape {list(here.shape)} here"
            )
    if saved.dealt_whole != own.dealt_whole:
        ways = ("cut anywhere", "dealt out whole")
        raise ValueError(
            f"in the shard parameters are {ways[saved.dealt_whole]}, and here they are "
            f"{ways[own.dealt_whole]}: save full_state_dict() there and load that"
        )


def _check_group_sizes(sizes: tuple[int, ...], own: Sharding) -> None:
    if sizes != own.group_sizes:
        raise ValueError(
            f"the state dict has {_counted(len(sizes), 'parameter group')} with {list(sizes)} "
            f"parameters, and this optimizer {len(own.group_sizes)} with {list(own.group_sizes)}: "
            "it is of another model, or add_param_group was called before only one of them"
        )


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
