"""Pure: which gradients are reduced together, and the offset of each in its bucket.

A bucket is one flat tensor: the gradients one after the other, each aligned; then one element per
gradient that says whether the rank has it (its *mask*), one for the rank itself, in one bucket
the ranks' weights (`hvdlite.optimizer.buckets.weight_codes`), and some that identify the round
(`hvdlite.optimizer.buckets.positions`). All of it is summed together.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from hvdlite.optimizer.buckets.positions import ELEMS as POSITION_ELEMS

# Alignment of each gradient in its bucket: a cache line, and the widest vector.
ALIGNMENT_BYTES = 64

# How many bytes are reduced in the time that one more bucket costs (docs/design/buckets.md).
COST_BYTES = 512 << 10
COST_BETWEEN_HOSTS_BYTES = 256 << 10
LARGEST_BYTES = 25 << 20
# The first bucket has 1 / FIRST_PART of the others' size; if the user sets that, at most this.
FIRST_PART = 4
LARGEST_FIRST_BYTES = 1 << 20


@dataclass(frozen=True)
class Item:
    """A gradient to place. kind: gradients of different kinds (dtype, device) never share a bucket.

    group: gradients of one group and kind share a bucket of any size; None: buckets go by size.
    """

    elems: int
    elem_bytes: int
    kind: Hashable
    group: int | None = None


@dataclass(frozen=True)
class BucketLayout:
    """One bucket: the indices of its gradients, the offset of each, and that of the masks."""

    members: tuple[int, ...]
    offsets_elems: tuple[int, ...]
    mask_offset_elems: int
    weights_elems: int = 0

    @property
    def weights_offset_elems(self) -> int:
        return self.mask_offset_elems + len(self.members) + 1

    @property
    def position_offset_elems(self) -> int:
        return self.weights_offset_elems + self.weights_elems

    @property
    def elems(self) -> int:
        return self.position_offset_elems + POSITION_ELEMS


def sizes_bytes(total_bytes: int, several_hosts: bool, overlaps: bool) -> tuple[int, int]:
    """The size of buckets, and of the first one, for `total_bytes` bytes of gradients.

    With n equal buckets, computing can't hide the last bucket, total / (n · speed), nor the fixed
    cost of all, n · cost. The sum is least for buckets of sqrt(total · speed · cost) bytes.

    overlaps: whether a reduction within a host runs while the ranks compute without slowing them
    down. If not, one reduction at the end is cheapest.
    """
    if not (overlaps or several_hosts):
        return max(total_bytes, 1), max(total_bytes, 1)
    cost_bytes = COST_BETWEEN_HOSTS_BYTES if several_hosts else COST_BYTES
    size = min(max(math.isqrt(total_bytes * cost_bytes), 1), LARGEST_BYTES)
    return size, -(-size // FIRST_PART)


def assign(
    items: Sequence[Item], bucket_bytes: int, first_bucket_bytes: int
) -> tuple[BucketLayout, ...]:
    """The buckets, in the order in which backward is expected to complete them.

    items: in the order in which backward is expected to produce them. A bucket is closed when it
    has reached its size; the first one is small, so that communication starts early. Every item is
    in exactly one bucket.
    """
    limits: dict[Hashable, int] = {}
    filling: dict[Hashable, list[int]] = {}
    filled_bytes: dict[Hashable, int] = {}
    full: list[list[int]] = []
    for index, item in enumerate(items):
        key = (item.kind, item.group)
        filling.setdefault(key, []).append(index)
        filled_bytes[key] = filled_bytes.get(key, 0) + item.elems * item.elem_bytes
        limit = limits.setdefault(key, min(first_bucket_bytes, bucket_bytes))
        if item.group is None and filled_bytes[key] >= limit:
            full.append(filling.pop(key))
            filled_bytes[key] = 0
            limits[key] = bucket_bytes
    # A bucket is complete with its last member.
    in_order = sorted([*full, *filling.values()], key=lambda members: members[-1])
    return tuple(_layout(items, members) for members in in_order)


def _layout(items: Sequence[Item], members: Sequence[int]) -> BucketLayout:
    offsets = []
    end = 0
    for index in members:
        elem_bytes = items[index].elem_bytes
        step = math.lcm(ALIGNMENT_BYTES, elem_bytes) // elem_bytes
        begin = -(-end // step) * step
        offsets.append(begin)
        end = begin + items[index].elems
    return BucketLayout(tuple(members), tuple(offsets), end)
