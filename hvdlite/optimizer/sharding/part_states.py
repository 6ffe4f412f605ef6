"""Which state of the optimizer this rank keeps, under which keys; and how it follows the division.

The wrapped optimizer's `state` has one entry for each portion of what this rank owns, by the view
of the portion, and one for each undivided parameter, by the parameter. The state lies as in the
last update, as in a shard that was loaded, or before either evenly divided; before an update, what
other ranks own by then moves to them.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch

from hvdlite.optimizer.gradients import Gradients
from hvdlite.optimizer.sharding.division import (
    Division,
    Part,
    by_buckets,
    deal,
    evenly,
    portions_of,
)
from hvdlite.optimizer.sharding.memory import in_memory_order
from hvdlite.optimizer.sharding.moving import Move
from hvdlite.optimizer.sharding.pieces import (
    Piece,
    State,
    Whole,
    flat_state,
    shaped_state,
    states_of,
)
from hvdlite.optimizer.sharding.shards import Shards
from hvdlite.optimizer.sharding.state_dicts import Sharding, loaded, shard_state_dict
from hvdlite.own_names import own_name
from hvdlite.shared import is_shared
from hvdlite.world.teams.process_sets import team_of


class PartStates:
    """The state of one sharded optimizer on this rank, and who updates what."""

    def __init__(
        self,
        shards: Shards,
        optimizer: torch.optim.Optimizer,
        name_of: Callable[[torch.Tensor, int], str],
    ) -> None:
        """optimizer: the wrapped one, which has all attributes in common with the sharded one."""
        self._shards = shards
        self._optimizer = optimizer
        self._name_of = name_of
        # How the state lies; and the parameters by the numbers there.
        self.held: Division | None = None
        self.params: list[torch.Tensor] = []
        # The division of the update, and what it was made for.
        self._division: Division | None = None
        self._made_for: object = None
        # By a parameter's id, begin and end: what the wrapped optimizer updates, and by which its
        # state is kept. Beside it the parameter, which so keeps its id.
        self._views: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def divide(self, gradients: Gradients) -> Division:
        """Who updates what, by the present buckets. The same object while nothing has changed.

        Raises:
            RuntimeError: The world has another number of ranks than had the state before.
        """
        # A new world counts generations anew, and what was made for the former one is closed.
        made_for = gradients.team, gradients.generation
        if self._division is None or self._made_for != made_for:
            before, owners = self._now(), len(self._shards.members)
            if len(before.cut) != owners:
                raise RuntimeError(
                    f"the state of this optimizer was divided among {len(before.cut)} ranks, and "
                    f"now there are {owners}: save the state before hvd.shutdown(), and load it "
                    "with load_state_dict after hvd.init()"
                )
            has_gradient = {id(slot.param) for slot in gradients.slots}
            frozen = {
                index
                for index, param in enumerate(self.params)
                if not param.requires_grad and id(param) not in has_gradient
            }
            self._division = self._divided(before, frozen, gradients)
            self._made_for = made_for
        return self._division

    def follow(self, division: Division, name: str) -> None:
        """Before the update of a division: moves the state to its owners. Every rank calls it with
        the same division; collective if that is a new one. name: of the optimizer."""
        if division is self.held:
            return
        before = self._now()
        move = None
        # Where each host's ranks divide it among them, another host's division may have changed.
        if (
            before.cut != division.cut
            or before.undivided != division.undivided
            or len(self._shards.members) < self._team().size
        ):
            label = own_name(name, "state", "the exchange of the state of {}")
            move = self._move(label, before, division.cut)
        self._recut(before, division, move)

    def keys_by_group(self, division: Division) -> list[list[torch.Tensor]]:
        """By group, what this rank updates, and by which it keeps its state."""
        keys: list[list[torch.Tensor]] = [[] for _ in self._groups()]
        group_of = [number for number, group in enumerate(self._groups()) for _ in group["params"]]
        for part in division.own:
            keys[group_of[part.index]].append(self.key_of(division, part))
        return keys

    def key_of(self, division: Division, part: Part) -> torch.Tensor:
        """By what the wrapped optimizer keeps the state of a part."""
        param = self.params[part.index]
        if part.index in division.undivided or not self._shards.elementwise:
            return param
        memory = in_memory_order(param)[part.begin : part.end]
        key = (id(param), part.begin, part.end)
        view, _ = self._views.setdefault(key, (memory, param))
        if view.data_ptr() != memory.data_ptr() or view.dtype != memory.dtype:
            # The parameter has got other memory.
            view.grad = None
            view.data = memory
        return view

    def state_dict(self, plain: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """This rank's shard. plain: the method of the wrapped class."""
        held = self._now()
        saved, pieces = self._saved(held, plain)
        return shard_state_dict(self._sharding(held), saved, [state for _, state in pieces])

    def full_state_dict(self, plain: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The state dict of one process, on member 0; {} elsewhere. Collective."""
        held, shards, wholes = self._now(), self._shards, self._wholes()
        saved, pieces = self._saved(held, plain)
        # Where each host's ranks share the state, those of the first host give theirs.
        everything = [Part(index, 0, whole.numel) for index, whole in enumerate(wholes)]
        wanted: list[Sequence[Part]] = [() for _ in held.cut]
        if shards.members[0] == 0:
            wanted[0] = everything
        move = self._move("DistributedOptimizer.full_state_dict", held, wanted)
        states = move.states(pieces, wanted[shards.owner], copies=True)
        if self._team().rank:
            return {}
        if shards.elementwise:
            states = list(map(shaped_state, states, wholes))
        numbers = iter(range(len(wholes)))
        return {
            **saved,
            "state": {index: state for index, state in enumerate(states) if state},
            "param_groups": [
                {**options, "params": [next(numbers) for _ in group["params"]]}
                for options, group in zip(saved["param_groups"], self._groups(), strict=True)
            ],
        }

    def load_state_dict(self, given: Any, plain: Callable[[dict[str, Any]], None]) -> None:
        """Takes what this rank needs of it. plain: the method of the wrapped class."""
        held, options, states = loaded(given, self._sharding(self._now()))
        kept = [self._as_kept(held, *each) for each in zip(held.own, states, strict=True)]
        numbers = iter(range(len(kept)))
        with self._keys_as_params(held):
            groups = [
                {**each, "params": [next(numbers) for _ in group["params"]]}
                for each, group in zip(options, self._groups(), strict=True)
            ]
            state = {number: each for number, each in enumerate(kept) if each}
            plain({"state": state, "param_groups": groups})
        self.held = held

    def _now(self) -> Division:
        """How the state lies, for the optimizer's present parameters."""
        params = [param for group in self._groups() for param in group["params"]]
        is_same = len(params) == len(self.params) and all(map(operator.is_, params, self.params))
        if self.held is not None and is_same:
            return self.held
        self._shards.know_members(self._team())
        # Parameters were added or removed: the others keep their owners. Every rank has all of the
        # new ones' state, if the wrapped optimizer had one before it was sharded.
        number = {param: index for index, param in enumerate(params)}
        held = self.held or Division(((),) * len(self._shards.members), frozenset(), ())
        kept = [number.get(param) for param in self.params]
        new = set(range(len(params))) - set(kept)
        whole = [Part(index, 0, params[index].numel()) for index in new]

        def present(parts: Sequence[Part]) -> tuple[Part, ...]:
            renumbered = [(kept[part.index], part) for part in parts]
            moved = [Part(i, part.begin, part.end) for i, part in renumbered if i is not None]
            return tuple(sorted([*moved, *whole]))

        undivided = {index for old in held.undivided if (index := kept[old]) is not None}
        before = Division(
            tuple(map(present, held.cut)), frozenset(undivided | new), present(held.own)
        )
        self.params, self._division = params, None
        after = self._divided(before, set(range(len(params))) - new, None)
        self._recut(before, after)
        return after

    def _divided(self, before: Division, kept: Set[int], gradients: Gradients | None) -> Division:
        """The division by the present buckets; without them, an even one. kept: the parameters that
        stay as they were before."""
        shards, params = self._shards, self.params
        owners = len(shards.members)
        number = {param: index for index, param in enumerate(params)}
        if gradients is None:
            divided = [param for param in params if number[param] not in kept]
            divided = [param for param in divided if shards.divides(param)]
        else:
            slots = [slot for slot in gradients.slots if shards.divides(slot.param, slot.form)]
            divided = sorted((slot.param for slot in slots), key=number.__getitem__)
        parts: list[list[Part]] = [[] for _ in range(owners)]
        if not shards.elementwise:
            for param, owner in deal(divided, owners, shards.owner_of).items():
                parts[owner].append(Part(number[param], 0, param.numel()))
        elif shards.shard and gradients is not None:
            parts = by_buckets(gradients.buckets, number, shards.members)
        else:
            parts = evenly({number[param]: param for param in divided}, owners)
        # (Parameters without elements are in no part, and every rank has their state.)
        undivided = set(range(len(params))) - {part.index for own in parts for part in own} - kept
        of_leaders = {i for i in undivided if params[i].numel() and is_shared(params[i])}
        for owner, own in enumerate(parts):
            # Nobody keeps a state that no update changes.
            updated = undivided if owner in shards.leaders else undivided - of_leaders
            own += [Part(index, 0, params[index].numel()) for index in updated]
            own += [part for part in before.cut[owner] if part.index in kept]
        undivided |= before.undivided & kept
        cut = tuple(tuple(sorted(own)) for own in parts)
        group_of = self._group_of()
        portions = [
            [part]
            if part.index in undivided or not shards.elementwise
            else portions_of(part, params[part.index], group_of[part.index])
            for part in cut[shards.owner]
        ]
        return Division(cut, frozenset(undivided), tuple(itertools.chain(*portions)))

    def _recut(self, before: Division, after: Division, move: Move | None = None) -> None:
        """Keeps the state by other parts. move: brings what other ranks have of it; None: this rank
        has all."""
        state: dict[Any, Any] = self._optimizer.state
        keys = [self.key_of(before, part) for part in before.own]
        pieces = self._pieces(before, [state.get(key, {}) for key in keys])
        states = (
            states_of(after.own, pieces, self._wholes())
            if move is None
            else move.states(pieces, after.own)
        )
        for key in keys:
            state.pop(key, None)
        for part, found in zip(after.own, states, strict=True):
            if found:
                found = self._on_device(part.index, self._as_kept(after, part, found))
                state[self.key_of(after, part)] = found
        self.held = after

    def _saved(
        self, held: Division, plain: Callable[[], dict[str, Any]]
    ) -> tuple[dict[str, Any], list[Piece]]:
        """What the wrapped class saves; and this rank's parts with their states."""
        with self._keys_as_params(held):
            saved = plain()
        return saved, self._pieces(held, [saved["state"].get(n, {}) for n in range(len(held.own))])

    def _pieces(self, held: Division, states: Iterable[Mapping[str, Any]]) -> list[Piece]:
        """This rank's parts with their states. states: as the wrapped optimizer has them."""
        return [
            (part, flat_state(state, self._whole(part.index)))
            if self._is_whole(held, part)
            else (part, state)
            for part, state in zip(held.own, states, strict=True)
        ]

    def _as_kept(self, held: Division, part: Part, state: State) -> State:
        """The state of a part as the wrapped optimizer has it."""
        is_whole = self._is_whole(held, part)
        return shaped_state(state, self._whole(part.index)) if is_whole else state

    def _is_whole(self, held: Division, part: Part) -> bool:
        """Whether an element-wise optimizer has the state of this part by the parameter."""
        return part.index in held.undivided and self._shards.elementwise

    @contextlib.contextmanager
    def _keys_as_params(self, held: Division) -> Iterator[None]:
        """Inside, the keys of this rank's state stand in the groups instead of the parameters."""
        groups = self._groups()
        params = [group["params"] for group in groups]
        try:
            put(groups, self.keys_by_group(held))
            yield
        finally:
            put(groups, params)
            put(self._groups(), params)  # load_state_dict has made new groups

    def _groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def _on_device(self, index: int, state: State) -> State:
        """As torch's load_state_dict places it."""
        group = self._group_of()[index]
        follows = group.get("fused") or group.get("capturable")
        return {
            key: value.to(self.params[index].device)
            if isinstance(value, torch.Tensor) and (key != "step" or follows)
            else value
            for key, value in state.items()
        }

    def _group_of(self) -> list[dict[str, Any]]:
        """The group of each parameter."""
        return [group for group in self._groups() for _ in group["params"]]

    def _sharding(self, held: Division) -> Sharding:
        shards = self._shards
        return Sharding(
            shards.kind.__name__,
            self._wholes(),
            tuple(len(group["params"]) for group in self._groups()),
            held,
            shards.owner,
            dealt_whole=not shards.elementwise,
            in_hosts=shards.shard is not True,
        )

    def _wholes(self) -> tuple[Whole, ...]:
        return tuple(map(self._whole, range(len(self.params))))

    def _whole(self, index: int) -> Whole:
        param = self.params[index]
        return Whole.of(self._name_of(param, index), param)

    def _move(self, name: str, held: Division, wanted: Sequence[Sequence[Part]]) -> Move:
        shards = self._shards
        circle = shards.members, shards.owner
        return Move(name, shards.process_set, *circle, self._wholes(), held.cut, wanted)

    def _team(self) -> Any:
        return team_of("DistributedOptimizer", self._shards.process_set)


def put(groups: Sequence[dict[str, Any]], params: Sequence[Any]) -> None:
    """What the groups hold from now on."""
    for group, each in zip(groups, params, strict=True):
        group["params"] = each
