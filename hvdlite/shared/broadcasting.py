"""Broadcasts of shared tensors: which ranks of which host write them.

The ranks that have a tensor at the same place have the same memory. One of each such ranks takes
part in the broadcast with that memory: the root, or the lowest of them; the others, which take part
too, throw away what they get. Large tensors go in chunks, so that this takes little memory. Where
all ranks have the root's memory, there is nothing to send.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hvdlite.collectives.differing_ranks import which_ranks
from hvdlite.shared.memory import Place, place_of
from hvdlite.world import world

CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class Shared:
    """A shared tensor of one rank: where it lies, and what must be the same on all ranks."""

    place: Place
    form: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Shared | None:
        """None if it is not shared."""
        place = place_of(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return None if place is None else cls(place, f"{dtype}{list(tensor.shape)}")


# What each member passes to a broadcast: its shared tensors, by name or index.
Passed = Sequence[Mapping[str | int, Shared]]


def problem_with(passed: Passed, ranks: Sequence[int]) -> str | None:
    """Why these can't be broadcast, alike on every member; None if they can.

    ranks: the world ranks of the members.
    """
    placement = world.current().placement
    for host, name in zip(placement.hosts, placement.host_names, strict=True):
        members = [rank for rank in host if rank in ranks]
        shares = any(passed[ranks.index(rank)] for rank in members)
        if shares and len(members) < len(host):
            return (
                f"ranks {list(host)} on {name} share parameters, but the process set has only "
                f"{members} of them; use one that has all ranks of a host"
            )
    for key in {key: None for one in passed for key in one}:
        there = [
            (one[key].form, rank) for one, rank in zip(passed, ranks, strict=True) if key in one
        ]
        forms = [form for form, _ in there]
        if len(set(forms)) > 1:
            found = which_ranks(forms, [rank for _, rank in there])
            return f"{key!r} differs: {found}; make it the same on every rank"
    return None


def is_sent(passed: Passed, key: str | int) -> bool:
    """Whether some member has other memory than the rest."""
    return len({one[key].place if key in one else None for one in passed}) > 1


def is_shared_somewhere(passed: Passed, key: str | int) -> bool:
    """Whether the tensor is shared on some member, so that all send it in chunks."""
    return any(key in one for one in passed)


def writes(passed: Passed, key: str | int, own: int, root: int) -> bool:
    """Whether this member takes part with its own memory. own, root: numbers of members."""
    mine = passed[own].get(key)
    if mine is None or own == root:
        return True
    same = [n for n, one in enumerate(passed) if key in one and one[key].place == mine.place]
    return root not in same and own == same[0]


def chunks(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The parts of a contiguous tensor that are sent one by one; at least one."""
    flat = tensor.reshape(-1)
    return list(torch.split(flat, _chunk_elems(flat.dtype))) if flat.numel() else [flat]


def scratch_chunks(dtype: torch.dtype, elems: int) -> list[torch.Tensor]:
    """As many tensors of the same sizes as `chunks` gives, for a rank that does not write. They lie
    in the same memory: what arrives there is not used."""
    most = _chunk_elems(dtype)
    scratch = torch.empty(min(most, elems), dtype=dtype, device="cpu")
    return [scratch[: elems - begin] for begin in range(0, elems, most)] or [scratch]


def _chunk_elems(dtype: torch.dtype) -> int:
    return CHUNK_BYTES // dtype.itemsize
