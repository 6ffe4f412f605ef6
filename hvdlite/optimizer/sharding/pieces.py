"""Cuts the state of a parameter into parts, and puts parts together again.

An element-wise optimizer's state of a part has tensors of the part's elements, one dimension in the
order of memory, and values that hold for the whole parameter (the number of steps).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from hvdlite.optimizer.sharding.cut import Part

State = dict[str, Any]


@dataclass(frozen=True)
class Whole:
    """One parameter. stride: where its memory has gaps, that of a contiguous one, as its state has
    it."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, name: str, param: torch.Tensor) -> Whole:
        stride = param.stride() if is_dense(param) else torch.empty_like(param).stride()
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


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its memory has no gaps: some order of the dimensions makes it contiguous."""
    steps = [(n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return not tensor.numel() or tensor.numel() == 1 + sum(steps)


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """A view of one dimension of a tensor whose memory has no gaps."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def part_of_state(state: Mapping[str, Any], whole: Whole, begin: int, end: int) -> State:
    """The state of a part from that of the whole parameter. Its tensors have memory of their own.

    Raises:
        ValueError: A tensor that has neither the parameter's shape nor one element.
    """
    result: State = {}
    for key, value in state.items():
        if not is_strided(value):
            result[key] = value
        elif key != "step" and tuple(value.shape) == whole.shape:
            result[key] = _as_laid_out(value, whole)[begin:end].clone()
        elif value.numel() == 1:
            result[key] = value.clone()
        else:
            raise ValueError(
                f"the state {key!r} of {whole.name!r} has the shape {list(value.shape)}, expected "
                f"{list(whole.shape)}, the parameter's: it is the state of another model"
            )
    return result


def is_strided(value: object) -> TypeGuard[torch.Tensor]:
    """Whether it is a tensor, and none of those that have no order of memory (sparse ones)."""
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def all_of_state(state: Mapping[str, Any], whole: Whole) -> State:
    """The state of all elements as that of a part, from that of the whole parameter; in the same
    memory where that is possible."""
    return {
        key: _as_laid_out(value, whole)
        if is_strided(value) and key != "step" and tuple(value.shape) == whole.shape
        else value
        for key, value in state.items()
    }


def shaped_state(state: Mapping[str, Any], whole: Whole) -> State:
    """The inverse of `all_of_state`."""
    part = Part(0, 0, whole.numel)
    return {
        key: shaped(value, whole) if is_cut_tensor(key, value, part) else value
        for key, value in state.items()
    }


def whole_state(pieces: Sequence[tuple[Part, Mapping[str, Any]]], whole: Whole) -> State:
    """The state of the whole parameter, as the optimizer of one process has it, from parts that
    together have all elements.

    Raises:
        ValueError: As `recut`.
    """
    result = recut(pieces, whole, 0, whole.numel)
    for key in _keys_of_cut_tensors(pieces):
        result[key] = shaped(result[key], whole)
    return result


def shaped(elements: torch.Tensor, whole: Whole) -> torch.Tensor:
    """All elements of a parameter, given in the order of memory, in its shape and strides."""
    return elements.as_strided(whole.shape, whole.stride)


def recut(
    pieces: Sequence[tuple[Part, Mapping[str, Any]]], whole: Whole, begin: int, end: int
) -> State:
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
    for part, state in used:
        if set(state) != set(first):
            raise ValueError(
                f"the state of {whole.name!r} has {sorted(first)} for the elements "
                f"{_range(first_part)}, but {sorted(state)} for {_range(part)}: these states "
                "were not saved in the same step"
            )
    # By all pieces: a piece of one element alone does not tell a cut tensor from a number.
    cut = _keys_of_cut_tensors(pieces)
    result: State = {}
    for key, value in first.items():
        if key in cut:
            result[key] = _joined([(part, state[key]) for part, state in used], begin, end)
            continue
        for part, state in used:
            if not same(state[key], value):
                raise ValueError(
                    f"the state {key!r} of {whole.name!r} is {_shown(value)} for the elements "
                    f"{_range(first_part)}, but {_shown(state[key])} for {_range(part)}: these "
                    "states were not saved in the same step"
                )
        result[key] = value.clone() if isinstance(value, torch.Tensor) else value
    return result


def recut_all(
    pieces: Sequence[tuple[Part, Mapping[str, Any]]],
    wholes: Sequence[Whole],
    wanted: Sequence[Part],
) -> Iterator[State]:
    """The state of each wanted part, from pieces that cover the same elements. Where a piece is the
    wanted part, its own state."""
    by_index: dict[int, list[tuple[Part, Mapping[str, Any]]]] = {}
    for piece in pieces:
        by_index.setdefault(piece[0].index, []).append(piece)
    for part in wanted:
        of_param = by_index[part.index]
        same_part = next((state for held, state in of_param if held == part), None)
        if same_part is not None:
            yield dict(same_part)
        elif any(state for _, state in of_param):
            yield recut(of_param, wholes[part.index], part.begin, part.end)
        else:
            yield {}


def is_cut_tensor(key: str, value: object, part: Part) -> bool:
    """Whether this may be state of the part's elements, and not of the whole parameter."""
    return is_strided(value) and key != "step" and tuple(value.shape) == (part.end - part.begin,)


def same(a: object, b: object) -> bool:
    """Whether two values of a state are equal. NaN equals NaN. Of tensors whose elements are not
    here (on the device "meta"), all that is known is compared."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.is_meta or b.is_meta:
            return a.dtype == b.dtype and a.shape == b.shape
        a, b = (each.detach().cpu().to_dense() for each in (a, b))
        return a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, 0, 0, True)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b or (a != a and b != b))


def _keys_of_cut_tensors(pieces: Sequence[tuple[Part, Mapping[str, Any]]]) -> set[str]:
    """The keys whose values are tensors of the part's elements in every piece."""
    keys = {key for _, state in pieces for key in state}
    return {
        key
        for key in keys
        if all(is_cut_tensor(key, state[key], part) for part, state in pieces if key in state)
    }


def _covering(
    pieces: Sequence[tuple[Part, Mapping[str, Any]]], whole: Whole, begin: int, end: int
) -> Iterator[tuple[Part, Mapping[str, Any]]]:
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


def _joined(pieces: Sequence[tuple[Part, torch.Tensor]], begin: int, end: int) -> torch.Tensor:
    """The elements from `begin` to `end`, of which every one is in some piece."""
    (first, *_) = (tensor for _, tensor in pieces)
    result = torch.empty(end - begin, dtype=first.dtype, device=first.device)
    for part, tensor in pieces:
        low, high = max(begin, part.begin), min(end, part.end)
        result[low - begin : high - begin] = tensor[low - part.begin : high - part.begin]
    return result


def _as_laid_out(value: torch.Tensor, whole: Whole) -> torch.Tensor:
    """The elements of a tensor of the parameter's shape, in the order of the parameter's memory."""
    if Whole.of(whole.name, value).steps != whole.steps:
        laid_out = torch.empty_strided(
            whole.shape, whole.stride, dtype=value.dtype, device=value.device
        )
        value = laid_out.copy_(value)
    return in_memory_order(value)


def _range(part: Part) -> str:
    return f"{part.begin} to {part.end - 1}"


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 else f"a tensor of {list(value.shape)}"
    return f"{value!s:.80}"
