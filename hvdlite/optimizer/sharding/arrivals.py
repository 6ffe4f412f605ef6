"""After an update: brings the elements that each owner has updated to the other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdlite import _core
from hvdlite.collectives.broadcast import broadcast_async_
from hvdlite.collectives.handles import Handle, Waitable, synchronize
from hvdlite.ops import DTYPES
from hvdlite.optimizer.buckets.slot import real_view
from hvdlite.optimizer.gradients import Gradients
from hvdlite.optimizer.overlap.in_flight import Arrival
from hvdlite.optimizer.sharding.cut_bucket import CutBucket
from hvdlite.optimizer.sharding.division import Division, ranges_in
from hvdlite.optimizer.sharding.memory import has_gaps, in_memory_order
from hvdlite.optimizer.sharding.shards import Shards
from hvdlite.own_names import own_name
from hvdlite.world.teams.team import Team


class Barrier(Arrival):
    """A barrier of the team, once per update."""

    def __init__(self, team: Team, name: str) -> None:
        super().__init__(())
        self._team = team
        self._posting = _core.posting(_core.BARRIER, name, False, _core.UINT8)

    def _post(self) -> Waitable:
        return self._team.post(self._posting)


class UnionInPlace(Arrival):
    """Of one bucket, on one host: the ranks give and take the elements where the parameters lie."""

    def __init__(self, bucket: CutBucket, team: Team, label: str, shards: Shards) -> None:
        super().__init__([slot.param for slot in bucket.slots])
        self._bucket, self._team, self._label = bucket, team, label
        self._written = {
            slot.param: offset
            for slot, offset in zip(bucket.slots, bucket.offsets_elems, strict=True)
            if slot.param.numel() and not shards.is_shared(slot.param)
        }
        self._plan: _core.Plan | None = None
        # Of the parameters, for which the plan was made.
        self._addresses: list[int] = []
        self._memories: list[torch.Tensor] = []

    def _post(self) -> Waitable:
        addresses = [param.data_ptr() for param in self._written]
        if self._plan is None or addresses != self._addresses:
            # At first, and where parameters have got other memory.
            self._memories = [real_view(in_memory_order(param)) for param in self._written]
            elems = 2 if self._bucket.flat.is_complex() else 1
            extents = [
                (elems * offset, elems * offset + memory.numel(), memory.data_ptr())
                for offset, memory in zip(self._written.values(), self._memories, strict=True)
            ]
            self._plan = _plan(self._bucket, self._team, self._label, 0, self._memories, extents)
            self._addresses = addresses
        return self._plan.start(self._memories)

    def _write(self) -> None:
        # As a copy_ would, so that autograd notices the changes.
        for param in self._written:
            torch.autograd.graph.increment_version(param)


class UnionInBucket(Arrival):
    """Of one bucket, between hosts, and of parameters on a GPU: in the memory of the gradients,
    which are not needed after the update."""

    def __init__(self, bucket: CutBucket, team: Team, label: str, shards: Shards) -> None:
        super().__init__([slot.param for slot in bucket.slots])
        self._bucket = bucket
        flat = bucket.flat
        self._flat = flat if flat.is_cpu else bucket.zeros(flat.numel(), flat.dtype, "cpu")
        self._memory = real_view(self._flat)
        self._plan = _plan(bucket, team, label, self._memory.data_ptr(), self._memory)
        self._own = list(ranges_in(bucket, team.rank))
        # What this rank copies from the united memory to the parameters: the elements of other
        # owners; of shared parameters a part of those that come from other hosts.
        local = shards.local_members
        self._others = [
            (slot, elems, place)
            for number, member in enumerate(shards.members)
            if member != team.rank
            for slot, elems, place in ranges_in(bucket, member)
            if not shards.is_shared(slot.param)
            or (member not in local and local[number % len(local)] == team.rank)
        ]

    def _post(self) -> Waitable:
        self._bucket.is_lent = True
        for slot, elems, place in self._own:
            self._flat[place].copy_(in_memory_order(slot.param)[elems])
        return self._plan.start(self._memory)

    def _write(self) -> None:
        for slot, elems, place in self._others:
            in_memory_order(slot.param)[elems].copy_(self._flat[place])
        self._bucket.is_lent = False
        self._bucket.give_back()


def _plan(
    bucket: CutBucket,
    team: Team,
    label: str,
    address: int,
    kept: Any,
    extents: Sequence[tuple[int, int, int]] | None = None,
) -> _core.Plan:
    flat = real_view(bucket.flat)
    dtype, cut_as = DTYPES[flat.dtype], DTYPES[bucket.wire.dtype]
    is_of_host = bucket.form == _core.PLAN_TO_HOST_OWNERS
    return team.plan(
        *(label, dtype, _core.SUM, address, address, flat.numel(), 1.0, 1.0, kept),
        form=_core.PLAN_UNITE_ON_HOST if is_of_host else _core.PLAN_UNITE,
        cut_as=-1 if cut_as == dtype else cut_as,
        extents=extents,
    )


class Delivery(Arrival):
    """Brings a whole parameter from its owner to every rank."""

    def __init__(
        self, param: torch.Tensor, owner: int, team: Team, label: str, shards: Shards
    ) -> None:
        super().__init__([param])
        self._label = label
        self._process_set = shards.process_set
        member = shards.members[owner]
        self._root = team.ranks[member]
        # Whether it comes in the parameter's own memory; else, whether this rank copies it there.
        self._is_direct = not shards.is_shared(param) and not has_gaps(param)
        is_far = member not in shards.local_members
        self._copies = not shards.is_shared(param) or (is_far and shards.owner in shards.leaders)
        self._memory = param
        self._handle: Handle | None = None

    def _post(self) -> Waitable:
        (param,) = self.params
        is_direct = self._is_direct
        self._memory = in_memory_order(param) if is_direct else param.detach().clone().contiguous()
        self._handle = broadcast_async_(self._memory, self._root, self._label, self._process_set)
        return self._handle.operation

    def _write(self) -> None:
        assert self._handle is not None
        synchronize(self._handle)
        (param,) = self.params
        if not self._is_direct and self._copies:
            param.detach().copy_(self._memory)
        self._memory = param


def arrivals_of(
    division: Division, params: Sequence[torch.Tensor], gradients: Gradients, shards: Shards
) -> list[Arrival]:
    """What makes the parameters whole after an update, in the order in which forward needs them.
    params: By number."""
    team = gradients.team
    if team is None or team.size == 1:
        return []

    def label(number: int) -> str:
        words = "the exchange of new parameters of {}"
        return own_name(gradients.name, f"whole.{number}", words)

    if shards.elementwise:
        return [
            (UnionInPlace if shards.owners_are_near and bucket.flat.is_cpu else UnionInBucket)(
                bucket, team, label(number), shards
            )
            # Forward needs the last buckets first.
            for number, bucket in reversed(tuple(enumerate(gradients.buckets)))
            if isinstance(bucket, CutBucket)
            and not (
                shards.owners_are_near
                and all(shards.is_shared(slot.param) for slot in bucket.slots)
            )
        ]
    trained = {id(slot.param) for slot in gradients.slots}
    dealt = [
        (params[part.index], owner)
        for owner, parts in enumerate(division.cut)
        for part in parts
        if part.index not in division.undivided and id(params[part.index]) in trained
    ]
    return [
        Delivery(param, owner, team, label(number), shards)
        for number, (param, owner) in enumerate(dealt)
        if not (shards.is_shared(param) and shards.owners_are_near)
    ]
