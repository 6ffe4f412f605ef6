"""Moves state from the ranks that have it to those that want it, one tensor after the other."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvdlite.collectives.alltoall import alltoall
from hvdlite.collectives.objects import allgather_object
from hvdlite.optimizer.sharding.cut import Part
from hvdlite.optimizer.sharding.pieces import (
    State,
    Whole,
    in_memory_order,
    is_dense,
    is_strided,
    recut,
    shaped,
)
from hvdlite.own_names import renamed
from hvdlite.world.teams.process_sets import ProcessSet

# How much of one tensor is under way at a time, beside the result.
CHUNK_BYTES = 32 * 1024 * 1024

Piece = tuple[Part, Mapping[str, Any]]
Parts = Sequence[Part]


@dataclass(frozen=True)
class _Member:
    """What one rank tells the others: what it has, without the elements, and what it wants."""

    circle: int
    pieces: Sequence[Piece]
    wanted: list[Part]

    def has(self, index: int) -> list[Piece]:
        return [piece for piece in self.pieces if piece[0].index == index]

    def gives(self, index: int) -> list[Part]:
        """The parts that it has a state of."""
        return [part for part, state in self.has(index) if state]

    def wants(self, index: int) -> list[Part]:
        return [part for part in self.wanted if part.index == index]


class Move:
    """One collective move of state, on one member of a process set."""

    def __init__(self, name: str, process_set: ProcessSet, member: int, circle: int = 0) -> None:
        """name: of the operations, the same on every member. member: this rank's number.
        circle: the members of a circle have each element once, and give to each other only; where
        the ranks of each host share the state among them, the host's number."""
        self._name = name
        self._process_set = process_set
        self._member = member
        self._circle = circle

    def full_states(
        self, wholes: Sequence[Whole], own: Sequence[Piece], *, dealt_whole: bool = False
    ) -> dict[int, State]:
        """The state of each parameter that has one, in host memory, as one process has it; on
        member 0, and {} on the others. Collective; blocks.

        own: The parts of this rank with their state.

        Raises:
            ValueError: The owners' states do not belong together; on every rank, with the same
                text.
        """
        everything = [Part(index, 0, whole.numel) for index, whole in enumerate(wholes)]
        wanted = everything if self._member == 0 else []
        states = self._moved(wholes, own, wanted, dealt_whole, shaped, copies=True)
        return {part.index: state for part, state in zip(wanted, states, strict=True) if state}

    def states(
        self,
        wholes: Sequence[Whole],
        own: Sequence[Piece],
        wanted: Sequence[Part],
        *,
        dealt_whole: bool = False,
    ) -> list[State]:
        """The states of the parts that this rank wants, in host memory where they have moved.
        Collective; blocks. Errors are those of `full_states`."""
        return self._moved(wholes, own, list(wanted), dealt_whole, lambda elements, _: elements)

    def _moved(
        self,
        wholes: Sequence[Whole],
        own: Sequence[Piece],
        wanted: list[Part],
        dealt_whole: bool,
        finish: Any,
        copies: bool = False,
    ) -> list[State]:
        described = [(part, _described(state)) for part, state in own]
        here = _Member(self._circle, described, wanted)
        members: list[_Member] = allgather_object(
            here, name=renamed(self._name, f"{self._name}.keys"), process_set=self._process_set
        )
        result: list[State] = [{} for _ in wanted]
        for index, whole in enumerate(wholes):
            templates = _templates(members, index, whole, dealt_whole)
            if not any(templates.values()):
                continue
            template = templates.get(self._circle, {})
            places = [place for place, part in enumerate(wanted) if part.index == index]
            mine = [state for part, state in own if part.index == index and state]
            for place in places:
                # Each part has numbers of its own, as an optimizer changes them in place.
                result[place].update({key: _own(value) for key, value in template.items()})
            for key, like in next(filter(None, templates.values())).items():
                if not _is_elsewhere(like):
                    continue
                held = [member.gives(index) for member in members]
                wants = [member.wants(index) for member in members]
                is_cut = not dealt_whole and tuple(like.shape) == (whole.numel,)
                if not is_cut:
                    # It belongs to the parameter as a whole: the first that has it gives it.
                    held = _held_by_first(members, held, like.numel())
                    wants = [[Part(index, 0, like.numel())] * len(parts) for parts in wants]
                tensors = [_flat(state[key]) for state in mine[: len(held[self._member])]]
                came = self._elements(like, members, held, wants, tensors, copies)
                for place, elements in zip(places, came, strict=True):
                    if is_cut:
                        result[place][key] = finish(elements, whole)
                    else:
                        result[place][key] = elements.as_strided(like.shape, like.stride())
        return result

    def _elements(
        self,
        like: torch.Tensor,
        members: Sequence[_Member],
        held: Sequence[Parts],
        wants: Sequence[Parts],
        tensors: Sequence[torch.Tensor],
        copies: bool,
    ) -> list[torch.Tensor]:
        """The elements of the parts that this member wants.

        held, wants: By member. tensors: The elements of the parts that this member has. copies:
            whether the result is in host memory of its own, also where nothing moves.
        """
        own = self._member
        if all(list(a) == list(b) for a, b in zip(held, wants, strict=True)):
            # The state that moves nowhere stays; a full one must not change with the next steps.
            return [part.to("cpu", copy=True) for part in tensors] if copies else list(tensors)
        result = [
            torch.empty(part.end - part.begin, dtype=like.dtype, device="cpu")
            for part in wants[own]
        ]
        chunk = max(1, CHUNK_BYTES // like.element_size())
        nothing = torch.empty(0, dtype=like.dtype, device="cpu")
        for begin in range(0, like.numel(), chunk):
            end = min(begin + chunk, like.numel())
            rows = [nothing]
            splits = torch.zeros(len(members), dtype=torch.int32, device="cpu")
            for to, member in enumerate(members):
                if member.circle != self._circle:
                    continue
                for _, number, low, high in _common(wants[to], held[own], begin, end):
                    first = held[own][number].begin
                    rows.append(tensors[number][low - first : high - first].cpu())
                    splits[to] += high - low
            name = renamed(self._name, f"{self._name}.elements")
            # As bytes: the state may have any dtype.
            sent = torch.cat(rows).view(torch.uint8)
            size_bytes = like.element_size()
            row, _ = alltoall(sent, splits * size_bytes, name, self._process_set)
            row = row.view(like.dtype)
            for giver, member in enumerate(members):
                if member.circle != self._circle:
                    continue
                for place, _, low, high in _common(wants[own], held[giver], begin, end):
                    first = wants[own][place].begin
                    result[place][low - first : high - first] = row[: high - low]
                    row = row[high - low :]
        return result


def _templates(
    members: Sequence[_Member], index: int, whole: Whole, dealt_whole: bool
) -> dict[int, State]:
    """By circle, the state of a parameter without the elements of its tensors."""
    result: dict[int, State] = {}
    for circle in sorted({member.circle for member in members if member.wants(index)}):
        pieces = [p for member in members if member.circle == circle for p in member.has(index)]
        if not any(state for _, state in pieces):
            result[circle] = {}
        elif dealt_whole:
            result[circle] = dict(next(state for _, state in pieces if state))
        else:
            result[circle] = recut(pieces, whole, 0, whole.numel)
    return result


def _described(state: Mapping[str, Any]) -> State:
    """A state with its numbers, and without the elements of its tensors."""
    result: State = {}
    for key, value in state.items():
        if not is_strided(value):
            result[key] = value
        elif value.dim() == 0 or key == "step":
            result[key] = value.detach().cpu()
        else:
            stride = value.stride() if is_dense(value) else value.contiguous().stride()
            result[key] = torch.empty_strided(value.shape, stride, dtype=value.dtype, device="meta")
    return result


def _is_elsewhere(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return in_memory_order(tensor if is_dense(tensor) else tensor.contiguous())


def _held_by_first(
    members: Sequence[_Member], held: Sequence[Parts], count: int
) -> list[list[Part]]:
    """By member: all elements, for the first member of each circle that has a part."""
    result: list[list[Part]] = []
    seen: set[int] = set()
    for member, parts in zip(members, held, strict=True):
        is_first = bool(parts) and member.circle not in seen
        result.append([Part(parts[0].index, 0, count)] if is_first else [])
        if is_first:
            seen.add(member.circle)
    return result


def _common(wants: Parts, held: Parts, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """What wanted and held parts have in common within a range: (number of the wanted part, of the
    held one, begin, end); in the same order for both sides. held: ascending, without common
    elements."""
    for place, part in enumerate(wants):
        low, high = max(begin, part.begin), min(end, part.end)
        number = bisect.bisect_right(held, low, key=lambda source: source.end)
        while number < len(held) and max(low, held[number].begin) < min(high, held[number].end):
            source = held[number]
            yield place, number, max(low, source.begin), min(high, source.end)
            number += 1
