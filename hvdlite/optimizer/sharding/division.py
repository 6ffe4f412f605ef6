"""Who updates what: computed from the buckets, alike on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hvdlite.optimizer.buckets.bucket import Bucket
from hvdlite.optimizer.buckets.slot import Slot
from hvdlite.optimizer.sharding.cut import Cut, Part
from hvdlite.optimizer.sharding.cut_bucket import CutBucket

# Cuts that no bucket makes are at multiples of so many elements of a parameter. torch's vector
# loops treat what is left at the end of a tensor in another way, which may round otherwise.
ALIGNMENT_ELEMS = 64


@dataclass(frozen=True)
class Division:
    """Who updates what.

    members: of the team, the owners, in order. owner: this rank's index among them. Parameters that
    are not divided have no part.
    """

    cut: Cut
    members: tuple[int, ...]
    owner: int

    @property
    def own(self) -> tuple[Part, ...]:
        return self.cut[self.owner]

    def parts_of(self, index: int) -> list[list[Part]]:
        """By owner, the parts of one parameter."""
        return [[part for part in parts if part.index == index] for parts in self.cut]


def by_buckets(
    buckets: Sequence[Bucket], index_of: dict[int, int], members: Sequence[int]
) -> list[list[Part]]:
    """By owner, the parts for which it gets gradients. index_of: by a parameter's id."""
    return [
        sorted(
            Part(index_of[id(slot.param)], begin - offset, end - offset)
            for bucket in buckets
            if isinstance(bucket, CutBucket)
            for slot, offset, begin, end in ranges_in(bucket, member)
        )
        for member in members
    ]


def ranges_in(bucket: CutBucket, member: int) -> list[tuple[Slot, int, int, int]]:
    """What a member owns in a bucket: a slot, its offset, begin and end in the flat memory."""
    found = []
    ranges = bucket.owned(member)
    for slot, offset in zip(bucket.slots, bucket.offsets_elems, strict=True):
        last = offset + slot.param.numel()
        for begin, end in ranges:
            low, high = max(begin, offset), min(end, last)
            if low < high:
                found.append((slot, offset, low, high))
    return found


def evenly(params: Sequence[tuple[int, torch.Tensor]], owners: int) -> list[list[Part]]:
    """By owner, about as many elements as the others have, in the order of the parameters.

    params: number and tensor.
    """
    lengths = [-(-param.numel() // ALIGNMENT_ELEMS) for _, param in params]
    each = -(-sum(lengths) // owners)
    parts: list[list[Part]] = [[] for _ in range(owners)]
    at = 0
    for (index, param), length in zip(params, lengths, strict=True):
        for owner in range(owners):
            begin = max(owner * each - at, 0) * ALIGNMENT_ELEMS
            end = min(max((owner + 1) * each - at, 0) * ALIGNMENT_ELEMS, param.numel())
            if begin < end:
                parts[owner].append(Part(index, begin, end))
        at += length
    return parts


def deal(
    params: Sequence[tuple[int, torch.Tensor]], owners: int, given: dict[int, int]
) -> dict[int, int]:
    """The owner of each parameter, by number: the greatest first, each to the owner that has the
    fewest elements so far. given: the owners of those that have one already."""
    loads = [0] * owners
    sizes = {index: param.numel() for index, param in params}
    for index, owner in given.items():
        loads[owner] += sizes[index]
    result = dict(given)
    for index in sorted(sizes, key=lambda index: (-sizes[index], index)):
        if index not in given:
            owner = loads.index(min(loads))
            result[index] = owner
            loads[owner] += sizes[index]
    return result
