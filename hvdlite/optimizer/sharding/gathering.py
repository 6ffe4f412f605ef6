"""Gathers the state of all owners on the first rank, one tensor after the other."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hvdlite.collectives import allgather_async, alltoall, rows_of, synchronize
from hvdlite.optimizer.sharding.cut import Part
from hvdlite.optimizer.sharding.pieces import State, Whole, in_memory_order, recut, shaped
from hvdlite.world.process_sets import ProcessSet

# How much of one tensor is under way at a time, beside the result.
CHUNK_BYTES = 32 * 1024 * 1024

Piece = tuple[Part, Mapping[str, Any]]


class Gathering:
    """One collective gathering, on one member of a process set."""

    def __init__(self, name: str, process_set: ProcessSet, member: int) -> None:
        """name: of the operations, the same on every member. member: this rank's number."""
        self._name = name
        self._process_set = process_set
        self._member = member

    def full_states(
        self, wholes: Sequence[Whole], own: Sequence[Piece], *, dealt_whole: bool = False
    ) -> dict[int, State]:
        """The state of each parameter that has one, in host memory, as one process has it; on
        member 0, and {} on the others. Collective; blocks.

        own: The parts of this rank with their state; none if other ranks give the same.

        Raises:
            ValueError: The owners' states do not belong together; on every rank, with the same
                text.
        """
        described = [(part, _described(state)) for part, state in own]
        everyones: list[list[Piece]] = self._everyones(described)
        result: dict[int, State] = {}
        for index, whole in enumerate(wholes):
            by_member = [
                [piece for piece in theirs if piece[0].index == index] for theirs in everyones
            ]
            pieces = [piece for theirs in by_member for piece in theirs]
            if not any(state for _, state in pieces):
                continue
            mine = [state for part, state in own if part.index == index]
            state = dict(pieces[0][1]) if dealt_whole else recut(pieces, whole, 0, whole.numel)
            for key, value in state.items():
                if not _is_elsewhere(value):
                    continue
                is_cut = not dealt_whole and tuple(value.shape) == (whole.numel,)
                if is_cut:
                    parts = [[part for part, _ in theirs] for theirs in by_member]
                    tensors = [each[key] for each in mine]
                else:
                    parts = _held_by_first(by_member, value.numel())
                    tensors = [each[key] for each in mine[: len(parts[self._member])]]
                elements = self._united(value, parts, [_flat(tensor) for tensor in tensors])
                if is_cut:
                    state[key] = shaped(elements, whole)
                else:
                    state[key] = elements.as_strided(value.shape, value.stride())
            if self._member == 0:
                result[index] = state
        return result

    def _united(
        self,
        like: torch.Tensor,
        parts: Sequence[Sequence[Part]],
        tensors: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """All elements on member 0; nothing of use on the others, and no memory there.

        parts: Those of each member. tensors: The elements of this member's parts.
        """
        count = like.numel()
        result = torch.empty(count, dtype=like.dtype, device="cpu" if self._member == 0 else "meta")
        nobody = [0] * (len(parts) - 1)
        chunk = max(1, CHUNK_BYTES // like.element_size())
        for begin in range(0, count, chunk):
            end = min(begin + chunk, count)
            given = [
                tensor[low - part.begin : high - part.begin].cpu()
                for part, tensor in zip(parts[self._member], tensors, strict=True)
                for low, high in _overlaps([part], begin, end)
            ]
            row = torch.cat([torch.empty(0, dtype=like.dtype, device="cpu"), *given])
            # To member 0 all of it, and nothing to the others.
            splits = torch.tensor([len(row), *nobody], dtype=torch.int32, device="cpu")
            row, _ = alltoall(row, splits, f"{self._name}.elements", self._process_set)
            if self._member:
                continue
            for theirs in parts:
                for low, high in _overlaps(theirs, begin, end):
                    result[low:high] = row[: high - low]
                    row = row[high - low :]
        return result

    def _everyones(self, thing: Any) -> list[Any]:
        """The objects of all members, in their order."""
        payload = torch.frombuffer(bytearray(pickle.dumps(thing)), dtype=torch.uint8)
        handle = allgather_async(payload, f"{self._name}.keys", self._process_set)
        everyones = synchronize(handle)
        parts = torch.split(everyones, list(rows_of(handle)))
        return [pickle.loads(part.numpy().data) for part in parts]


def _described(state: Mapping[str, Any]) -> State:
    """A state with numbers, and without the elements of its tensors."""
    result: State = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            result[key] = value
        elif value.dim() == 0 or key == "step":
            result[key] = value.detach().cpu()
        else:
            stride = value.stride() if _is_dense(value) else value.contiguous().stride()
            result[key] = torch.empty_strided(value.shape, stride, dtype=value.dtype, device="meta")
    return result


def _is_elsewhere(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return in_memory_order(tensor if _is_dense(tensor) else tensor.contiguous())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its memory has no gaps, so that strides and elements in that order describe it."""
    steps = [(n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.numel() == 1 + sum(steps)


def _held_by_first(by_member: Sequence[Sequence[Piece]], count: int) -> list[list[Part]]:
    """What belongs to a parameter as a whole comes from the first member that has a part of it."""
    holder = next(member for member, theirs in enumerate(by_member) if theirs)
    return [[Part(0, 0, count)] if member == holder else [] for member in range(len(by_member))]


def _overlaps(parts: Sequence[Part], begin: int, end: int) -> Iterator[tuple[int, int]]:
    for part in parts:
        low, high = max(begin, part.begin), min(end, part.end)
        if low < high:
            yield low, high
