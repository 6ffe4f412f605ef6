"""Cuts the state of a parameter into parts, and joins parts.

An element-wise optimizer's state of a part has tensors of the part's elements, one dimension in the
order of memory, and values that hold for the whole parameter (the number of steps).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from hvdlite.optimizer.sharding.division import Part
from hvdlite.optimizer.sharding.memory import has_gaps, laid_out_as

State = dict[str, Any]
Piece = tuple[Part, Mapping[str, Any]]


@dataclass(frozen=True)
class Whole:
    """One parameter. stride: where its memory has gaps, that of a contiguous one, as its state has
    it."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, name: str, param: torch.Tensor) -> Whole:
        stride = torch.empty_like(param).stride() if has_gaps(param) else param.stride()
        return cls(name, tuple(param.shape), tuple(stride))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def steps(self) -> tuple[int, ...]:
        """The strides that matter: tensors of the same ones have the same order of memory."""
        return tuple(
            stride if size > 1 else 0 for size, stride in zip(self.shape, self.stride, strict=True)
        )


class MissingElements(ValueError):
    """No piece has these elements."""

    def __init__(self, name: str, begin: int, end: int) -> None:
        super().__init__(f"no given state has the elements {begin} to {end - 1} of {name!r}")
        self.begin, self.end = begin, end


def flat_state(state: Mapping[str, Any], whole: Whole) -> State:
    """The state of a whole parameter as that of a part; in the same memory where that is
    possible."""
    return {
        key: laid_out_as(value, whole.stride)
        if _is_strided(value) and key != "step" and tuple(value.shape) == whole.shape
        else value
        for key, value in state.items()
    }


def shaped_state(state: Mapping[str, Any], whole: Whole) -> State:
    """The inverse of `flat_state`."""
    part = Part(0, 0, whole.numel)
    return {
        key: value.as_strided(whole.shape, whole.stride) if _is_cut(key, value, part) else value
        for key, value in state.items()
    }


def part_of_state(state: Mapping[str, Any], whole: Whole, begin: int, end: int) -> State:
    """The state of a part from that of the whole parameter. Its tensors have memory of their own.

    Raises:
        ValueError: A tensor that has neither the parameter's shape nor one element.
    """
    for key, value in state.items():
        has_shape = key != "step" and _is_strided(value) and tuple(value.shape) == whole.shape
        if _is_strided(value) and value.numel() != 1 and not has_shape:
            raise ValueError(
                f"the state {key!r} of {whole.name!r} has the shape {list(value.shape)}, expected "
                f"{list(whole.shape)}, the parameter's: it is the state of another model"
            )
    return recut([(Part(0, 0, whole.numel), flat_state(state, whole))], whole, begin, end)


def recut(pieces: Sequence[Piece], whole: Whole, begin: int, end: int) -> State:
    """The state of the elements from `begin` to `end` of one parameter, from parts that were cut in
    another way. Parts may overlap; then their elements are equal, or one has no state.

    Raises:
        MissingElements: The parts have not all of these elements.
        ValueError: The parts' states do not belong together.
    """
    used = list(_covering(pieces, whole, begin, end))
    if not used:
        return {}
    first_part, first = used[0]
    # By all pieces: a piece of one element alone does not tell a cut tensor from a number.
    cut = {
        key
        for key in first
        if all(_is_cut(key, state[key], part) for part, state in pieces if key in state)
    }
    for part, state in used:
        if state.keys() != first.keys():
            what = f"of {whole.name!r} has"
            raise _disagreement(what, (first_part, sorted(first)), (part, sorted(state)))
        for key in first.keys() - cut:
            if not same(state[key], first[key]):
                what = f"{key!r} of {whole.name!r} is"
                raise _disagreement(what, (first_part, first[key]), (part, state[key]))
    result: State = {}
    for key, value in first.items():
        if key in cut:
            result[key] = torch.empty(end - begin, dtype=value.dtype, device=value.device)
            for part, state in used:
                low, high = max(begin, part.begin), min(end, part.end)
                elems = state[key][low - part.begin : high - part.begin]
                result[key][low - begin : high - begin] = elems
        else:
            result[key] = value.clone() if isinstance(value, torch.Tensor) else value
    return result


def states_of(
    wanted: Iterable[Part], pieces: Iterable[Piece], wholes: Sequence[Whole]
) -> list[State]:
    """The states of these parts, from pieces of any parameters. A piece that is such a part stays
    as it is, as one of an optimizer that looks at whole tensors does. Errors are those of
    `recut`."""
    pieces_of = by_index(pieces)
    states = []
    for part in wanted:
        of_param = pieces_of.get(part.index, [])
        same_part = [dict(state) for held, state in of_param if held == part]
        if same_part:
            states.append(max(same_part, key=bool))
        elif any(state for _, state in of_param):
            states.append(recut(of_param, wholes[part.index], part.begin, part.end))
        else:
            states.append({})
    return states


def by_index(pieces: Iterable[Piece]) -> dict[int, list[Piece]]:
    """By the number of their parameter."""
    result: dict[int, list[Piece]] = {}
    for piece in pieces:
        result.setdefault(piece[0].index, []).append(piece)
    return result


def same(a: object, b: object) -> bool:
    """Whether two values of a state are equal. NaN equals NaN."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        a, b = (each.detach().cpu().to_dense() for each in (a, b))
        return a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, 0, 0, True)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b or (a != a and b != b))


def _is_strided(value: object) -> TypeGuard[torch.Tensor]:
    """Whether it is a tensor, and none of those that have no order of memory (sparse ones)."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _is_cut(key: str, value: object, part: Part) -> bool:
    """Whether this may be state of the part's elements, and not of the whole parameter."""
    return _is_strided(value) and key != "step" and tuple(value.shape) == (part.end - part.begin,)


def _covering(pieces: Sequence[Piece], whole: Whole, begin: int, end: int) -> Iterator[Piece]:
    """Those of the pieces, by their first elements, that bring the elements of a range. A parameter
    without elements has the state of any one."""
    ordered = sorted(pieces, key=lambda p: (p[0].begin, -p[0].end, not p[1]))
    if not whole.numel:
        yield from ordered[:1]
        return
    reached = begin
    for part, state in ordered:
        if part.end <= reached or part.begin >= end:
            continue
        if part.begin > reached:
            raise MissingElements(whole.name, reached, part.begin)
        yield part, state
        reached = part.end
    if reached < end:
        raise MissingElements(whole.name, reached, end)


def _disagreement(what: str, one: tuple[Part, object], other: tuple[Part, object]) -> ValueError:
    there, here = (f"{part.begin} to {part.end - 1}" for part, _ in (one, other))
    return ValueError(
        f"the state {what} {_shown(one[1])} for the elements {there}, but {_shown(other[1])} for "
        f"{here}: these states were not saved in the same step"
    )


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 else f"a tensor of {list(value.shape)}"
    return f"{value!s:.80}"
