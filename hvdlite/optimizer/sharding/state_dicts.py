"""The state dicts of sharded optimizers: one rank's shard, marked as such, and what loads from it.

A rank that gets its own shard takes the cut that it was saved under; from all shards of a training,
or from the state dict of one process, it takes what its cut needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from hvdlite.optimizer.sharding.cut import Cut, Part
from hvdlite.optimizer.sharding.pieces import (
    MissingElements,
    State,
    Whole,
    part_of_state,
    recut,
    whole_state,
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
    cut: The parts of all owners.
    owner: Whose shard it is, counted from 0.
    dealt_whole: The optimizer looks at whole tensors: each parameter has one part, and a state of
        any shape.
    undivided: The numbers of parameters whose state is not cut: all owners have it in full, or, of
        a shared parameter, one owner per host.
    in_hosts: The ranks of each host have all of the state among them; hosts may divide it in
        different ways.
    portions: This owner's parts, cut further, as it keeps its state; None: as they are in `cut`.
    """

    optimizer: str
    wholes: tuple[Whole, ...]
    group_sizes: tuple[int, ...]
    cut: Cut
    owner: int
    dealt_whole: bool = False
    undivided: frozenset[int] = frozenset()
    in_hosts: bool = False
    portions: tuple[Part, ...] | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """Of which this rank has a state each."""
        return self.cut[self.owner] if self.portions is None else self.portions

    def mark(self) -> dict[str, Any]:
        """In types that torch.load(weights_only=True) reads."""
        return {
            "version": VERSION,
            "optimizer": self.optimizer,
            "owner": self.owner,
            "owners": len(self.cut),
            "cut": [_numbers(parts) for parts in self.cut],
            "portions": None if self.portions is None else _numbers(self.portions),
            "names": [whole.name for whole in self.wholes],
            "shapes": [list(whole.shape) for whole in self.wholes],
            "strides": [list(whole.stride) for whole in self.wholes],
            "group_sizes": list(self.group_sizes),
            "dealt_whole": self.dealt_whole,
            "undivided": sorted(self.undivided),
            "in_hosts": self.in_hosts,
        }

    @classmethod
    def of_mark(cls, mark: Mapping[str, Any]) -> Sharding:
        """Raises ValueError for a version that this hvdlite does not know."""
        if mark.get("version") != VERSION:
            raise ValueError(
                f"the shard has version {mark.get('version')} of the format, and this hvdlite "
                f"reads version {VERSION}: load it with the hvdlite that saved it, and save "
                "optimizer.full_state_dict() there"
            )
        described = zip(mark["names"], mark["shapes"], mark["strides"], strict=True)
        return cls(
            mark["optimizer"],
            tuple(Whole(name, tuple(shape), tuple(stride)) for name, shape, stride in described),
            tuple(mark["group_sizes"]),
            tuple(map(_parts, mark["cut"])),
            mark["owner"],
            mark["dealt_whole"],
            frozenset(mark["undivided"]),
            mark["in_hosts"],
            # Shards that were saved before there were portions do not name them.
            None if (portions := mark.get("portions")) is None else _parts(portions),
        )


def shard_state_dict(
    sharding: Sharding, groups: Sequence[Mapping[str, Any]], states: Sequence[Mapping[str, Any]]
) -> ShardStateDict:
    """One rank's shard. The tensors in it are those of `states`, and not copies.

    groups: The parameter groups, whose "params" are left out: a plain optimizer that gets them in
        some way or other has groups of another size, and raises an error.
    states: The state of each part of this owner; empty where there is none.
    """
    options = [{**group, "params": []} for group in groups]
    state = {number: dict(state) for number, state in enumerate(states) if state}
    return ShardStateDict({"state": state, "param_groups": options, MARK: sharding.mark()})


def is_shard(given: object) -> bool:
    return isinstance(given, Mapping) and MARK in given


@dataclass(frozen=True)
class Loaded:
    """What a rank takes from what it was given.

    sharding: Of which its parts are: its own, or that of its shard.
    groups: The options of the parameter groups, without "params".
    states: The state of each part, in their order; empty where there is none.
    """

    sharding: Sharding
    groups: list[dict[str, Any]]
    states: list[State]


def loaded(given: object, own: Sharding) -> Loaded:
    """What this rank takes from a state dict of one process, from its own shard, or from a list of
    shards that together have what it needs.

    Raises:
        ValueError: It is of another optimizer or model, another rank's shard, one of another
            number of them, or elements are missing.
    """
    if isinstance(given, Mapping):
        return _from_own_shard(given, own) if is_shard(given) else _from_full(given, own)
    if isinstance(given, (list, tuple)) and given and all(map(is_shard, given)):
        return _from_shards(given, own)
    raise ValueError(
        f"load_state_dict({type(given).__name__}): expected what optimizer.state_dict() or "
        "full_state_dict() has returned, or a list of the first, from all ranks"
    )


def full_states(
    shards: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[int, State]]:
    """The number and the state of each parameter, from the shards of all owners. Parameters
    without a state are left out."""
    first = Sharding.of_mark(shards[0][MARK])
    found = [_pieces(shard, first) for shard in shards]
    for index, whole in enumerate(first.wholes):
        pieces = [piece for by_index in found for piece in by_index.get(index, ())]
        if not any(state for _, state in pieces):
            continue
        if first.dealt_whole:
            yield index, dict(next(state for _, state in pieces if state))
        else:
            yield index, whole_state(pieces, whole)


def _from_full(given: Mapping[str, Any], own: Sharding) -> Loaded:
    if "param_groups" not in given or "state" not in given:
        raise ValueError(
            "load_state_dict: the state dict has no 'state' and 'param_groups' (full_state_dict() "
            "gives {} on all ranks but rank 0: give every rank what rank 0 has got)"
        )
    groups = [dict(group) for group in given["param_groups"]]
    keys = [group.pop("params") for group in groups]
    _check_group_sizes(tuple(map(len, keys)), own)
    ids = [key for group_keys in keys for key in group_keys]
    states: list[State] = []
    for part in own.parts:
        state = given["state"].get(ids[part.index], {})
        if not own.dealt_whole:
            state = part_of_state(state, own.wholes[part.index], part.begin, part.end)
        states.append(dict(state))
    return Loaded(own, groups, states)


def _from_own_shard(given: Mapping[str, Any], own: Sharding) -> Loaded:
    saved = Sharding.of_mark(given[MARK])
    _check_model(saved, own)
    of_all = (
        f"on every rank, give load_state_dict a list of the shards of all {len(saved.cut)} owners, "
        "optimizer.load_state_dict([torch.load(file) for file in files])"
    )
    if len(saved.cut) != len(own.cut):
        raise ValueError(
            f"the shard is one of {len(saved.cut)}, and here {_counted(len(own.cut), 'rank')} "
            f"share the state: {of_all}"
        )
    if saved.owner != own.owner:
        raise ValueError(
            f"the shard is that of owner {saved.owner} of {len(saved.cut)}, and this rank is owner "
            f"{own.owner} (counted from 0): load the file that this rank has saved"
        )
    if _steps(saved) != _steps(own):
        raise ValueError(
            "the parameters lay in memory in another order (memory_format) when the shard was "
            f"saved: {of_all}"
        )
    states = [dict(given["state"].get(number, {})) for number in range(len(saved.parts))]
    return Loaded(
        dataclasses.replace(own, cut=saved.cut, undivided=saved.undivided, portions=saved.portions),
        _options(given),
        states,
    )


def _from_shards(given: Sequence[Mapping[str, Any]], own: Sharding) -> Loaded:
    marks = [Sharding.of_mark(shard[MARK]) for shard in given]
    for saved in marks:
        _check_model(saved, own)
    first = marks[0]
    for saved in marks:
        is_alike = saved.cut == first.cut or (saved.in_hosts and first.in_hosts)
        if not is_alike or _steps(saved) != _steps(first):
            raise ValueError(
                f"these shards were not saved together: one has {_counted(len(first.cut), 'owner')}"
                f", another {len(saved.cut)}, or they divide the parameters in different ways"
            )
    found = [_pieces(shard, saved) for shard, saved in zip(given, marks, strict=True)]
    states = []
    for part in own.parts:
        pieces = [piece for by_index in found for piece in by_index.get(part.index, ())]
        try:
            states.append(_state_of(part, pieces, first, own))
        except MissingElements as missing:
            lacking = sorted(
                owner
                for owner, parts in enumerate(first.cut)
                for each in parts
                if each.index == part.index
                and each.begin < missing.end
                and each.end > missing.begin
            )
            there = ", ".join(str(owner) for owner in sorted({saved.owner for saved in marks}))
            raise ValueError(
                f"{missing}: the shards given are those of the owners {there} of {len(first.cut)}, "
                f"and owner {lacking[0] if lacking else 'unknown'} has them; give load_state_dict "
                "the shards of all owners"
            ) from None
    return Loaded(own, _options(given[0]), states)


def _state_of(
    part: Part,
    pieces: Sequence[tuple[Part, Mapping[str, Any]]],
    saved: Sharding,
    own: Sharding,
) -> State:
    """The state of a part of this rank, from all the pieces of its parameter."""
    whole = saved.wholes[part.index]
    if own.dealt_whole:
        if not pieces:
            raise MissingElements(whole.name, part.begin, part.end)
        return dict(next((state for _, state in pieces if state), {}))
    if whole.steps == own.wholes[part.index].steps:
        return recut(pieces, whole, part.begin, part.end)
    state = whole_state(pieces, whole)
    return part_of_state(state, own.wholes[part.index], part.begin, part.end)


def _pieces(
    shard: Mapping[str, Any], saved: Sharding
) -> dict[int, list[tuple[Part, Mapping[str, Any]]]]:
    """The parts of a shard with their states, by the parameter's number."""
    parts = Sharding.of_mark(shard[MARK]).parts
    result: dict[int, list[tuple[Part, Mapping[str, Any]]]] = {}
    for number, part in enumerate(parts):
        result.setdefault(part.index, []).append((part, shard["state"].get(number, {})))
    return result


def _numbers(parts: Sequence[Part]) -> list[list[int]]:
    return [[part.index, part.begin, part.end] for part in parts]


def _parts(numbers: Sequence[Sequence[int]]) -> tuple[Part, ...]:
    return tuple(Part(*each) for each in numbers)


def _options(shard: Mapping[str, Any]) -> list[dict[str, Any]]:
    groups = [dict(group) for group in shard["param_groups"]]
    for group in groups:
        group.pop("params", None)
    return groups


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


def _steps(sharding: Sharding) -> list[tuple[int, ...]]:
    return [whole.steps for whole in sharding.wholes]


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
