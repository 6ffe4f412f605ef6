"""Which part of the update this rank does."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hvdlite import _core
from hvdlite.compression import Compressor
from hvdlite.errors import HorovodInternalError
from hvdlite.optimizer.buckets.bucket import Bucket
from hvdlite.optimizer.buckets.gpu_bucket import plain_bucket
from hvdlite.optimizer.buckets.layout import BucketLayout
from hvdlite.optimizer.buckets.pages import Pages
from hvdlite.optimizer.buckets.slot import Form, Slot
from hvdlite.optimizer.sharding.cut import Part
from hvdlite.optimizer.sharding.cut_bucket import CutBucket
from hvdlite.optimizer.sharding.division import Division, by_buckets, deal, evenly
from hvdlite.optimizer.sharding.elementwise import is_elementwise
from hvdlite.optimizer.sharding.memory import has_gaps
from hvdlite.optimizer.sharding.portions import portions_of
from hvdlite.optimizer.sharding.words import joined
from hvdlite.shared import is_shared
from hvdlite.world import world
from hvdlite.world.teams.process_sets import ProcessSet
from hvdlite.world.teams.team import Team

if TYPE_CHECKING:
    from hvdlite.optimizer.gradients import Gradients


class Shards:
    """Decides for one optimizer which gradients are sharded, and who updates what.

    An element-wise optimizer's parameters are cut, others are dealt out whole. Not divided are
    parameters whose gradients are sparse, parameters with gaps in their memory, and, with
    shard=False, those that are not shared: every rank updates them, of shared ones one per host.
    """

    def __init__(
        self,
        kind: type[torch.optim.Optimizer],
        shard: bool | str,
        groups: Callable[[], Sequence[dict[str, Any]]],
        process_set: ProcessSet,
    ) -> None:
        """kind: the optimizer's class. shard: True, False or "host". groups: gives its current
        param_groups."""
        self.kind = kind
        self.shard = shard
        self.elementwise = is_elementwise(kind)
        self.process_set = process_set
        self._groups = groups
        # The members of the team: the owners, this rank's index among them; and those on its host.
        self.members: tuple[int, ...] = ()
        self.owner = 0
        self.local_members: tuple[int, ...] = ()
        # The indices of the owners that update the shared parameters which are not divided: of
        # each host the lowest.
        self.leaders: frozenset[int] = frozenset()
        self._several_hosts = False
        # By id, the parameters that were shared when the buckets were made.
        self._shared: dict[int, torch.Tensor] = {}
        self._division: Division | None = None
        # What it was made for; and the parameters by number.
        self._made_for: object = None
        self.params: list[torch.Tensor] = []
        # The owners of what is dealt out whole.
        self._owner_of: list[tuple[weakref.ref[torch.Tensor], int]] = []

    @property
    def form(self) -> int:
        """Of the plans that reduce gradients to their owners."""
        return _core.PLAN_TO_HOST_OWNERS if self.shard == "host" else _core.PLAN_TO_OWNERS

    @property
    def owners_are_near(self) -> bool:
        """Whether all owners of the parameters that this rank sees are on its host."""
        return len(self.members) == len(self.local_members)

    def look_at(self, team: Team, params: Sequence[torch.Tensor], slots: Sequence[Slot]) -> None:
        """Before buckets are made: marks the slots whose gradients are sharded."""
        self.know_members(team)
        self._shared = {id(param): param for param in params if is_shared(param)}
        for slot in slots:
            slot.is_sharded = bool(self.shard) and self._is_divided(slot)
            slot.in_parts = slot.is_sharded and self.elementwise

    def know_members(self, team: Team) -> None:
        """Who the owners are."""
        placement = world.current().placement
        ranks = set(placement.local_ranks)
        self.local_members = tuple(i for i, rank in enumerate(team.ranks) if rank in ranks)
        everyone = tuple(range(team.size))
        self._several_hosts = self.local_members != everyone
        # Whole parameters come from their owners by broadcasts of all, also with shard="host".
        by_all = self.shard is True or (self.shard and not self.elementwise)
        self.members = everyone if by_all else self.local_members
        self.owner = self.members.index(team.rank)
        host_of = {rank: host for host, ranks in enumerate(placement.hosts) for rank in ranks}
        lowest: dict[int, int] = {}
        for owner, member in enumerate(self.members):
            lowest.setdefault(host_of[team.ranks[member]], owner)
        self.leaders = frozenset(lowest.values())

    def is_shared(self, param: torch.Tensor) -> bool:
        """Whether it was shared when the buckets were made."""
        return id(param) in self._shared

    @property
    def shares_any(self) -> bool:
        return bool(self._shared)

    @property
    def is_leader(self) -> bool:
        """Whether this rank updates the shared parameters that are not divided."""
        return self.owner in self.leaders

    def make_bucket(
        self,
        layout: BucketLayout,
        slots: Sequence[Slot],
        compression: type[Compressor],
        pages: Pages | None,
    ) -> Bucket:
        """A bucket that is reduced to owners, if its slots are in parts."""
        if slots[layout.members[0]].in_parts:
            return CutBucket(layout, slots, compression, pages, self.form)
        return plain_bucket(layout, slots, compression, pages)

    def require_all_members(self, gradients: Gradients) -> None:
        """After the reductions of a round.

        Raises:
            HorovodInternalError: A member has joined. On all others.
        """
        assert gradients.team is not None
        if gradients.buckets and (self.shard or self.shares_any):
            total = gradients.buckets[0].totals()[-1]
            if not gradients.combining.counts_all_ranks(total, gradients.team.size):
                raise HorovodInternalError(joined())

    def take_gradients(self, gradients: Gradients) -> None:
        """After a round: unsets `.grad` of what this rank has not whole. May be called again."""
        owner_of: dict[int, int] | None = None
        for slot in gradients.slots:
            if not slot.is_sharded or not slot.has_result():
                continue
            if slot.in_parts:
                if not isinstance(slot.bucket, CutBucket):
                    continue
                grad, place = slot.param.grad, slot.view
                if grad is not None and grad is not place and grad is slot.round_grad:
                    # The buckets were whole, and this has an autograd graph.
                    assert place is not None
                    place.copy_(grad.detach())
            else:
                if owner_of is None:
                    owner_of = self._dealt(gradients)
                if owner_of[id(slot.param)] == self.owner:
                    continue
            slot.param.grad = slot.round_grad = None

    def divide(self, gradients: Gradients) -> Division:
        """Who updates what, by the present buckets. The same object while nothing has changed."""
        # A new world counts generations anew, and what was made for the former one is closed.
        made_for = gradients.team, gradients.generation
        if self._division is not None and self._made_for == made_for:
            return self._division
        params = [param for group in self._groups() for param in group["params"]]
        index_of = {id(param): index for index, param in enumerate(params)}
        owners = len(self.members)
        divided = [
            (index_of[id(slot.param)], slot.param)
            for slot in gradients.slots
            if self._is_divided(slot)
        ]
        divided.sort(key=lambda pair: pair[0])
        if not self.elementwise:
            owner_of = self._dealt(gradients)
            parts: list[list[Part]] = [[] for _ in range(owners)]
            for index, param in divided:
                parts[owner_of[id(param)]].append(Part(index, 0, param.numel()))
        elif self.shard:
            parts = by_buckets(gradients.buckets, index_of, self.members)
        else:
            parts = evenly(divided, owners)
        self._keep_frozen(parts, index_of, {index for index, _ in divided})
        cut = tuple(tuple(sorted(each)) for each in parts)
        self.params = params
        self._division = Division(cut, self.members, self.owner)
        self._made_for = made_for
        return self._division

    def portions(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        """By what this rank updates these parts, and keeps their state."""
        if not self.elementwise:
            return tuple(parts)
        groups = self._groups()
        params = [param for group in groups for param in group["params"]]
        return portions_of(parts, params, groups)

    def _keep_frozen(
        self, parts: list[list[Part]], index_of: dict[int, int], divided: set[int]
    ) -> None:
        """Adds the parts of parameters that have no gradients now: their state stays."""
        before = self._division
        if before is None or before.members != self.members:
            return
        for former, own in zip(before.cut, parts, strict=True):
            for part in former:
                index = index_of.get(id(self.params[part.index]))
                if index is not None and index not in divided:
                    own.append(Part(index, part.begin, part.end))

    def _dealt(self, gradients: Gradients) -> dict[int, int]:
        """By id, the owner of each parameter that is dealt out whole; once dealt, it stays."""
        known = [(param, owner) for param, owner in self._owner_of if param() is not None]
        owner_of = {id(param()): owner for param, owner in known if owner < len(self.members)}
        params = [(id(s.param), s.param) for s in gradients.slots if self._is_divided(s)]
        new = [pair for pair in params if pair[0] not in owner_of]
        if new:
            numbered = [(i, param) for i, (_, param) in enumerate(params)]
            given = {i: owner_of[key] for i, (key, _) in enumerate(params) if key in owner_of}
            owners = deal(numbered, len(self.members), given)
            self._owner_of = [(weakref.ref(param), owners[i]) for i, param in numbered] + [
                pair for pair in known if id(pair[0]()) not in {key for key, _ in params}
            ]
            return self._dealt(gradients)
        return owner_of

    def _is_divided(self, slot: Slot) -> bool:
        if slot.form in (Form.SPARSE, Form.ROWS):
            return False
        if not self.shard and not self.is_shared(slot.param):
            return False
        if self.elementwise and slot.param.is_complex() and self._several_hosts:
            # Between hosts a complex number might be cut in two.
            return False
        return not (self.elementwise and has_gaps(slot.param))
