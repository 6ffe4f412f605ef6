"""Which state of the optimizer this rank keeps, under which keys; and how it follows the division.

The wrapped optimizer's `state` has one entry for each portion of what this rank owns, by the view
of the portion, and one for each undivided parameter, by the parameter. The division of the state is
that of the last update, of a shard that was loaded, or before either an even one; before an update,
what other ranks own by then moves to them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvdlite.optimizer.sharding.cut import Cut, Part
from hvdlite.optimizer.sharding.division import Division, deal, evenly
from hvdlite.optimizer.sharding.memory import has_gaps
from hvdlite.optimizer.sharding.moving import Move, Piece
from hvdlite.optimizer.sharding.pieces import (
    Whole,
    all_of_state,
    part_of_state,
    recut_all,
    shaped_state,
)
from hvdlite.optimizer.sharding.shards import Shards
from hvdlite.optimizer.sharding.state_dicts import Sharding, loaded, shard_state_dict
from hvdlite.optimizer.sharding.update import Update
from hvdlite.shared import is_shared
from hvdlite.world.teams.process_sets import team_of


@dataclass(frozen=True)
class _Held:
    """Whose state lies where.

    cut: The parts of all owners, ascending. A parameter that is not divided is a part of every
        owner that updates it: of all, or, if it is shared, of the leaders.
    undivided: The numbers of these.
    own: This rank's parts in the portions by which it keeps its state: `cut`, cut further.
    """

    cut: Cut
    undivided: frozenset[int]
    own: tuple[Part, ...]

    def lies_as(self, other: _Held) -> bool:
        """Whether each state is on the same rank. All ranks find the same."""
        return self.cut == other.cut and self.undivided == other.undivided


class PartStates:
    """The state of one sharded optimizer on this rank."""

    def __init__(
        self, shards: Shards, update: Update, name_of: Callable[[torch.Tensor, int], str]
    ) -> None:
        self._shards = shards
        self._update = update
        self._name_of = name_of
        self._held: _Held | None = None
        # The parameters by the numbers in `_held`.
        self._params: list[torch.Tensor] = []
        # The division that `_held` is, if it is that of an update.
        self._followed: Division | None = None

    def state_dict(self, optimizer: Any, plain: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """This rank's shard. plain: the method of the wrapped class."""
        held = self._now(optimizer)
        with self._keys_as_params(optimizer, held):
            saved = plain()
        sharding = self._sharding(optimizer, held)
        states = [state for _, state in self._pieces(held, saved["state"])]
        shard = shard_state_dict(sharding, saved["param_groups"], states)
        for key, value in saved.items():
            shard.setdefault(key, value)
        return shard

    def full_state_dict(
        self, optimizer: Any, plain: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """The state dict of one process, on member 0; {} elsewhere. Collective."""
        held = self._now(optimizer)
        with self._keys_as_params(optimizer, held):
            saved = plain()
        states = self._move().full_states(
            self._wholes(),
            self._pieces(held, saved["state"]),
            dealt_whole=not self._shards.elementwise,
        )
        if self._team().rank:
            return {}
        groups = []
        number = 0
        for options, group in zip(saved["param_groups"], optimizer.param_groups, strict=True):
            count = len(group["params"])
            groups.append({**options, "params": list(range(number, number + count))})
            number += count
        return {**saved, "state": states, "param_groups": groups}

    def load_state_dict(
        self, optimizer: Any, given: Any, plain: Callable[[dict[str, Any]], None]
    ) -> None:
        """Takes what this rank needs of it. plain: the method of the wrapped class."""
        found = loaded(given, self._sharding(optimizer, self._now(optimizer)))
        held = _Held(found.sharding.cut, found.sharding.undivided, found.sharding.parts)
        wholes = self._wholes()
        states: dict[int, Mapping[str, Any]] = {}
        for number, (part, state) in enumerate(
            zip(found.sharding.parts, found.states, strict=True)
        ):
            if state:
                shapes = part.index in held.undivided and self._shards.elementwise
                states[number] = shaped_state(state, wholes[part.index]) if shapes else state
        with self._keys_as_params(optimizer, held) as numbers:
            groups = [
                {**options, "params": keys}
                for options, keys in zip(found.groups, numbers, strict=True)
            ]
            plain({"state": states, "param_groups": groups})
        self._held, self._followed = held, None

    def follow(self, optimizer: Any, division: Division, name: str) -> None:
        """Before the update of a division: moves the state to its owners. Every rank calls it with
        the same division; collective if that is a new one."""
        if division is self._followed:
            return
        before = self._now(optimizer)
        after = self._held_by(division, before)
        state: dict[Any, Any] = optimizer.state
        # Where each host's ranks divide it among them, another host's division may have changed.
        moves = not after.lies_as(before) or len(self._shards.members) < self._team().size
        if moves or after.own != before.own:
            keys = self._keys(before)
            by_number = {n: state[key] for n, key in enumerate(keys) if state.get(key)}
            wholes, pieces = self._wholes(), self._pieces(before, by_number)
            if moves:
                states = self._move(name).states(
                    wholes, pieces, after.own, dealt_whole=not self._shards.elementwise
                )
            else:
                states = list(recut_all(pieces, wholes, after.own))
            old = set(map(id, keys))
            new = {key: value for key, value in state.items() if id(key) not in old}
            for part, key, moved in zip(after.own, self._keys(after), states, strict=True):
                if moved:
                    if part.index in after.undivided and self._shards.elementwise:
                        moved = shaped_state(moved, wholes[part.index])
                    new[key] = self._on_device(optimizer, part.index, moved)
            # In the same dict: the user may have it. Nothing communicates from here on.
            state.clear()
            state.update(new)
            self._held = after
        self._followed = division

    def _now(self, optimizer: Any) -> _Held:
        """Whose state lies where now, for the optimizer's present parameters."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        held = self._held
        is_same = len(params) == len(self._params)
        if held is not None and is_same and all(map(_is, params, self._params)):
            return held
        self._shards.know_members(self._team())
        new = self._evenly(params)
        if held is not None:
            # Parameters were added or removed: the others keep their owners.
            index_of = {id(param): index for index, param in enumerate(params)}
            number = {old: index_of.get(id(param)) for old, param in enumerate(self._params)}
            known = {index for index in number.values() if index is not None}

            def with_new(old: Iterable[Part], added: Iterable[Part]) -> tuple[Part, ...]:
                kept = [_renumbered(part, number) for part in old]
                return tuple(
                    sorted(
                        [part for part in kept if part is not None]
                        + [part for part in added if part.index not in known]
                    )
                )

            new = _Held(
                tuple(map(with_new, held.cut, new.cut)),
                frozenset(index for i in held.undivided if (index := number[i]) is not None)
                | (new.undivided - known),
                with_new(held.own, new.own),
            )
        self._held, self._params, self._followed = new, params, None
        self._divide_whole_states(optimizer, new)
        return new

    def _evenly(self, params: Sequence[torch.Tensor]) -> _Held:
        """The division before there is one."""
        shards = self._shards
        numbered = [
            (index, param)
            for index, param in enumerate(params)
            if (shards.shard or is_shared(param))
            and not (shards.elementwise and (has_gaps(param) or not param.numel()))
        ]
        divided = {index for index, _ in numbered}
        owners = len(shards.members)
        if shards.elementwise:
            parts = evenly(numbered, owners)
        else:
            parts = [[] for _ in range(owners)]
            for index, owner in deal(numbered, owners, {}).items():
                parts[owner].append(Part(index, 0, params[index].numel()))
        undivided = frozenset(set(range(len(params))) - divided)
        cut = self._with_undivided(parts, undivided, params, is_shared)
        return _Held(cut, undivided, cut[shards.owner])

    def _held_by(self, division: Division, before: _Held) -> _Held:
        """What is kept for an update. The state of frozen parameters stays where it is."""
        if len(division.cut) != len(before.cut):
            raise RuntimeError(
                f"the state of this optimizer was divided among {len(before.cut)} ranks, and now "
                f"there are {len(division.cut)}: save the state before hvd.shutdown(), and load it "
                "with load_state_dict after hvd.init()"
            )
        divided = {part.index for parts in division.cut for part in parts}
        rest = {
            index: param.requires_grad
            for index, param in enumerate(self._params)
            if index not in divided
        }
        frozen = {index for index, is_trained in rest.items() if not is_trained}
        parts = [
            [*own, *(part for part in old if part.index in frozen)]
            for own, old in zip(division.cut, before.cut, strict=True)
        ]
        trained = frozenset(set(rest) - frozen)
        cut = self._with_undivided(parts, trained, self._params, self._shards.is_shared)
        undivided = trained | (before.undivided & frozen)
        own = cut[self._shards.owner]
        whole = [part for part in own if part.index in undivided]
        in_portions = self._shards.portions([p for p in own if p.index not in undivided])
        return _Held(cut, undivided, tuple(sorted([*whole, *in_portions])))

    def _with_undivided(
        self,
        parts: Sequence[Sequence[Part]],
        undivided: frozenset[int],
        params: Sequence[torch.Tensor],
        is_shared: Callable[[torch.Tensor], bool],
    ) -> Cut:
        """Adds to each owner's parts the undivided parameters that it updates: so nobody keeps a
        state that no update changes."""
        leaders = self._shards.leaders
        # (Of one without elements every rank has the state.)
        of_leaders = {i for i in undivided if params[i].numel() and is_shared(params[i])}
        cut = []
        for owner, own in enumerate(parts):
            updated = undivided if owner in leaders else undivided - of_leaders
            added = [Part(index, 0, params[index].numel()) for index in updated]
            cut.append(tuple(sorted([*own, *added])))
        return tuple(cut)

    def _divide_whole_states(self, optimizer: Any, held: _Held) -> None:
        """The state that the wrapped optimizer had, before it was sharded: this rank keeps what it
        owns of it."""
        state: dict[Any, Any] = optimizer.state
        wholes = self._wholes()
        for index, param in enumerate(self._params):
            if param not in state:
                continue
            parts = [part for part in held.own if part.index == index]
            if self._shards.elementwise and index not in held.undivided:
                whole = state.pop(param)
                for part in parts:
                    state[self._key(held, part)] = part_of_state(
                        whole, wholes[index], part.begin, part.end
                    )
            elif not parts:
                del state[param]

    def _pieces(self, held: _Held, states: Mapping[int, Mapping[str, Any]]) -> list[Piece]:
        """This rank's parts with their states. states: by the part's number."""
        wholes = self._wholes()
        pieces: list[Piece] = []
        for number, part in enumerate(held.own):
            state = states.get(number, {})
            if part.index in held.undivided and self._shards.elementwise:
                state = all_of_state(state, wholes[part.index])
            pieces.append((part, state))
        return pieces

    @contextlib.contextmanager
    def _keys_as_params(self, optimizer: Any, held: _Held) -> Iterator[list[list[int]]]:
        """Inside, the keys of this rank's state stand in the groups instead of the parameters.
        Gives their numbers by group."""
        groups: list[dict[str, Any]] = vars(optimizer)["param_groups"]
        params = [group["params"] for group in groups]
        keys = self._keys(held)
        numbers: list[list[int]] = []
        first = 0
        for group_params in params:
            last = first + len(group_params)
            numbers.append([n for n, part in enumerate(held.own) if first <= part.index < last])
            first = last
        try:
            for group, own_numbers in zip(groups, numbers, strict=True):
                group["params"] = [keys[number] for number in own_numbers]
            yield numbers
        finally:
            # load_state_dict has made new groups.
            for changed in (groups, vars(optimizer)["param_groups"]):
                for group, group_params in zip(changed, params, strict=True):
                    group["params"] = group_params

    def _keys(self, held: _Held) -> list[torch.Tensor]:
        return [self._key(held, part) for part in held.own]

    def _key(self, held: _Held, part: Part) -> torch.Tensor:
        param = self._params[part.index]
        return param if part.index in held.undivided else self._update.key_of(param, part)

    def _on_device(self, optimizer: Any, index: int, state: dict[str, Any]) -> dict[str, Any]:
        """As torch's load_state_dict places it."""
        param = self._params[index]
        group = next(
            group for group in optimizer.param_groups if any(p is param for p in group["params"])
        )
        follows = bool(group.get("fused") or group.get("capturable"))
        return {
            key: value.to(param.device)
            if isinstance(value, torch.Tensor) and (key != "step" or follows)
            else value
            for key, value in state.items()
        }

    def _sharding(self, optimizer: Any, held: _Held) -> Sharding:
        return Sharding(
            self._shards.kind.__name__,
            self._wholes(),
            tuple(len(group["params"]) for group in optimizer.param_groups),
            held.cut,
            self._shards.owner,
            dealt_whole=not self._shards.elementwise,
            undivided=held.undivided,
            in_hosts=self._shards.shard is not True,
            portions=held.own,
        )

    def _wholes(self) -> tuple[Whole, ...]:
        return tuple(
            Whole.of(self._name_of(param, index), param) for index, param in enumerate(self._params)
        )

    def _move(self, name: str = "DistributedOptimizer.full_state_dict") -> Move:
        shards = self._shards
        return Move(name, shards.process_set, self._team().rank, circle=shards.members[0])

    def _team(self) -> Any:
        return team_of("DistributedOptimizer", self._shards.process_set)


def _renumbered(part: Part, number: Mapping[int, int | None]) -> Part | None:
    index = number[part.index]
    return None if index is None else Part(index, part.begin, part.end)


def _is(a: object, b: object) -> bool:
    return a is b
