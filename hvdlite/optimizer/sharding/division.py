"""Which rank has which elements of the parameters."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvdlite.optimizer.buckets.bucket import Bucket
from hvdlite.optimizer.buckets.slot import Slot
from hvdlite.optimizer.sharding.cut_bucket import CutBucket

# Cuts that no bucket makes are at multiples of so many elements of a parameter. torch's vector
# loops treat what is left at the end of a tensor in another way, which may round otherwise.
ALIGNMENT_ELEMS = 64

# Of a portion, for each thread: an optimizer has two to five tensors of this size in hand
# (docs/design/sharding.md has the measurements).
PORTION_BYTES = 512 * 1024


@dataclass(frozen=True, order=True)
class Part:
    """Some elements of one parameter, counted in the order of its memory.

    index: The parameter's number in the optimizer, counted through all its groups.
    """

    index: int
    begin: int
    end: int

    def common(self, other: Part) -> Part | None:
        """The elements of both."""
        begin, end = max(self.begin, other.begin), min(self.end, other.end)
        is_one = self.index == other.index and (begin < end or self == other)
        return Part(self.index, begin, end) if is_one else None


def parts_of(index: int, parts: Sequence[Part]) -> Sequence[Part]:
    """Those of one parameter. parts: ascending."""
    begin = bisect.bisect_left(parts, Part(index, 0, 0))
    return parts[begin : bisect.bisect_left(parts, Part(index + 1, 0, 0))]


# The parts of each owner, ascending. The owners are the members of a process set, in its order, or
# the ranks of a host.
Cut = tuple[tuple[Part, ...], ...]


@dataclass(frozen=True)
class Division:
    """Who updates what, and keeps its state.

    cut: Each element of a divided parameter has one owner.
    undivided: The numbers of the parameters that are not divided. Each is a part of every owner
        that updates it: of all, or, if it is shared, of one per host.
    own: This rank's parts in portions, by which it keeps its state: its part of `cut`, cut further.
    """

    cut: Cut
    undivided: frozenset[int]
    own: tuple[Part, ...]


def by_buckets(
    buckets: Sequence[Bucket], number: Mapping[torch.Tensor, int], members: Sequence[int]
) -> list[list[Part]]:
    """By owner, the parts for which it gets gradients. number: of each parameter."""
    return [
        [
            Part(number[slot.param], elems.start, elems.stop)
            for bucket in buckets
            if isinstance(bucket, CutBucket)
            for slot, elems, _ in ranges_in(bucket, member)
        ]
        for member in members
    ]


def ranges_in(bucket: CutBucket, member: int) -> Iterator[tuple[Slot, slice, slice]]:
    """What a member owns in a bucket: a slot, the elements of its parameter, and their place in the
    flat memory."""
    ranges = bucket.owned(member)
    for slot, offset in zip(bucket.slots, bucket.offsets_elems, strict=True):
        for begin, end in ranges:
            low, high = max(begin, offset), min(end, offset + slot.param.numel())
            if low < high:
                yield slot, slice(low - offset, high - offset), slice(low, high)


def evenly(params: Mapping[int, torch.Tensor], owners: int) -> list[list[Part]]:
    """By owner, about as many elements as the others have, in the order of the parameters. params:
    by number."""
    lengths = [-(-param.numel() // ALIGNMENT_ELEMS) for param in params.values()]
    each = -(-sum(lengths) // owners)
    parts: list[list[Part]] = [[] for _ in range(owners)]
    at = 0
    for (index, param), length in zip(params.items(), lengths, strict=True):
        for owner in range(owners):
            begin = max(owner * each - at, 0) * ALIGNMENT_ELEMS
            end = min(max((owner + 1) * each - at, 0) * ALIGNMENT_ELEMS, param.numel())
            if begin < end:
                parts[owner].append(Part(index, begin, end))
        at += length
    return parts


def deal(
    params: Sequence[torch.Tensor], owners: int, given: Mapping[torch.Tensor, int]
) -> dict[torch.Tensor, int]:
    """The owner of each parameter: the greatest first, each to the owner that has the fewest
    elements so far. given: the owners of those that have one already."""
    result = {param: given[param] for param in params if given.get(param, owners) < owners}
    loads = [0] * owners
    for param, owner in result.items():
        loads[owner] += param.numel()
    for param in sorted(params, key=torch.Tensor.numel, reverse=True):
        if param not in result:
            result[param] = loads.index(min(loads))
            loads[result[param]] += param.numel()
    return result


def portions_of(part: Part, param: torch.Tensor, group: Mapping[str, Any]) -> list[Part]:
    """The portions of a part that an element-wise optimizer is given one after the other.

    Such an optimizer goes over its tensors once for each operation of its formula (Adam's has about
    ten). A portion is small enough to stay in the caches of the cores from one operation to the
    next. "fused" does all operations in one, and "foreach" each one for all tensors: these get
    whole parts. Portions are a rank's own matter: they say by what it keeps its state, and not who
    owns what.
    """
    if group.get("fused") or group.get("foreach") or not param.is_cpu:
        return [part]
    elems = torch.get_num_threads() * PORTION_BYTES // param.element_size()
    size = part.end - part.begin
    number = max(round(size / max(elems, ALIGNMENT_ELEMS)), 1)
    cuts = (
        (part.begin + i * size // number) // ALIGNMENT_ELEMS * ALIGNMENT_ELEMS
        for i in range(1, number)
    )
    ends = sorted({part.begin, part.end, *(cut for cut in cuts if cut > part.begin)})
    return [Part(part.index, begin, end) for begin, end in itertools.pairwise(ends)]
