"""States that each rank has for itself: all are brought to rank 0, which writes them, and each
goes back to the rank that had it.

The frame of a state (`without_tensors`) is small, and every rank has those of all; the tensors
travel to or from rank 0 alone, one of each rank at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hvdlite.collectives.alltoall import alltoall
from hvdlite.recipes.state_trees import TensorPlace, places_in, with_tensors
from hvdlite.state import is_of_rank
from hvdlite.tensor_bytes import flat_bytes
from hvdlite.world import world


def has_own_state(thing: Any) -> bool:
    """Whether the ranks' states of it differ: an optimizer with Adasum, which steps with the rank's
    own gradients, and a GradScaler, which looks at those."""
    return is_of_rank(thing) or isinstance(thing, torch.amp.GradScaler)


def to_rank_0(operation: str, frames: Sequence[Any], tensors: Sequence[torch.Tensor]) -> list[Any]:
    """The trees of all ranks, on rank 0; on the others []. Every rank calls it; blocks.

    frames: by rank. tensors: those of this rank, in host memory.
    """
    places = [places_in(frame) for frame in frames]
    is_first = world.rank() == 0
    found: list[list[torch.Tensor]] = [[] for _ in frames]
    for index in range(max(map(len, places))):
        rows = _bytes(tensors[index : index + 1])
        splits = [rows.numel()] + [0] * (world.size() - 1)
        received, _ = alltoall(rows, splits, f"hvdlite.{operation}.to rank 0.{index}")
        begin = 0
        for rank, own in enumerate(places if is_first else []):
            if index < len(own):
                end = begin + _bytes_of(own[index])
                found[rank].append(_tensor(own[index], received[begin:end]))
                begin = end
    if not is_first:
        return []
    return [with_tensors(frame, own) for frame, own in zip(frames, found, strict=True)]


def from_rank_0(
    operation: str, frames: Sequence[Any], tensors: Sequence[Sequence[torch.Tensor]]
) -> Any:
    """The inverse: this rank's tree. Every rank calls it; blocks.

    frames: by rank. tensors: on rank 0, by rank, in host memory; on the others they do not count.
    """
    places = [places_in(frame) for frame in frames]
    own = places[world.rank()]
    found = []
    for index in range(max(map(len, places))):
        rows, splits = _bytes([]), [0] * world.size()
        if world.rank() == 0:
            rows = _bytes([given[index] for given in tensors if index < len(given)])
            splits = [_bytes_of(each[index]) if index < len(each) else 0 for each in places]
        received, _ = alltoall(rows, splits, f"hvdlite.{operation}.from rank 0.{index}")
        if index < len(own):
            found.append(_tensor(own[index], received))
    return with_tensors(frames[world.rank()], found)


def _bytes(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The elements of all of them, one after the other."""
    parts = [flat_bytes(tensor) for tensor in tensors]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device="cpu")


def _bytes_of(place: TensorPlace) -> int:
    return place.numel * place.dtype.itemsize


def _tensor(place: TensorPlace, rows: torch.Tensor) -> torch.Tensor:
    """A tensor of that form with these bytes."""
    # In memory of its own, which begins where any dtype may begin.
    elements = rows.clone().view(place.dtype).reshape(place.shape)
    return place.empty().copy_(elements)
