"""Which gradients are sharded, and who the owners are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from hvdlite import _core
from hvdlite.compression import Compressor
from hvdlite.errors import HorovodInternalError
from hvdlite.optimizer.buckets.bucket import Bucket
from hvdlite.optimizer.buckets.gpu_bucket import plain_bucket
from hvdlite.optimizer.buckets.layout import BucketLayout
from hvdlite.optimizer.buckets.pages import Pages
from hvdlite.optimizer.buckets.slot import Form, Slot
from hvdlite.optimizer.sharding.cut_bucket import CutBucket
from hvdlite.optimizer.sharding.division import deal
from hvdlite.optimizer.sharding.elementwise import is_elementwise
from hvdlite.optimizer.sharding.memory import has_gaps
from hvdlite.optimizer.sharding.words import JOINED
from hvdlite.shared import is_shared
from hvdlite.world import world
from hvdlite.world.teams.process_sets import ProcessSet
from hvdlite.world.teams.team import Team

if TYPE_CHECKING:
    from hvdlite.optimizer.gradients import Gradients


class Shards:
    """Decides for one optimizer which gradients are sharded, and which parameters are divided.

    An element-wise optimizer's parameters are cut, others are dealt out whole. Not divided are
    parameters whose gradients are sparse, parameters with gaps in their memory, and, with
    shard=False, those that are not shared: every rank updates them, of shared ones one per host.
    """

    def __init__(
        self, kind: type[torch.optim.Optimizer], shard: bool | str, process_set: ProcessSet
    ) -> None:
        """kind: the optimizer's class. shard: True, False or "host"."""
        self.kind = kind
        self.shard = shard
        self.elementwise = is_elementwise(kind)
        self.process_set = process_set
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
        # The owners of what is dealt out whole. Once dealt, it stays.
        self.owner_of: Mapping[torch.Tensor, int] = {}

    @property
    def owners_are_near(self) -> bool:
        """Whether all owners of the parameters that this rank sees are on its host."""
        return len(self.members) == len(self.local_members)

    def look_at(self, team: Team, params: Sequence[torch.Tensor], slots: Sequence[Slot]) -> None:
        """Before buckets are made: marks the slots whose gradients are sharded."""
        self.know_members(team)
        self._shared = {id(param): param for param in params if is_shared(param)}
        for slot in slots:
            slot.is_sharded = bool(self.shard) and self.divides(slot.param, slot.form)
            slot.in_parts = slot.is_sharded and self.elementwise
        if not self.elementwise:
            divided = [slot.param for slot in slots if self.divides(slot.param, slot.form)]
            self.owner_of = deal(divided, len(self.members), self.owner_of)

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

    def divides(self, param: torch.Tensor, form: Form = Form.UNKNOWN) -> bool:
        """Whether each of its elements has one owner. form: of its gradients."""
        if form in (Form.SPARSE, Form.ROWS) or not (self.shard or is_shared(param)):
            return False
        # Between hosts a complex number might be cut in two.
        might_be_cut_in_two = param.is_complex() and self._several_hosts
        return not (self.elementwise and (might_be_cut_in_two or has_gaps(param)))

    def make_bucket(
        self,
        layout: BucketLayout,
        slots: Sequence[Slot],
        compression: type[Compressor],
        pages: Pages | None,
    ) -> Bucket:
        """A bucket that is reduced to owners, if its slots are in parts."""
        if not slots[layout.members[0]].in_parts:
            return plain_bucket(layout, slots, compression, pages)
        form = _core.PLAN_TO_HOST_OWNERS if self.shard == "host" else _core.PLAN_TO_OWNERS
        return CutBucket(layout, slots, compression, pages, form)

    def require_all_members(self, gradients: Gradients) -> None:
        """After the reductions of a round.

        Raises:
            HorovodInternalError: A member has joined. On all others.
        """
        assert gradients.team is not None
        if gradients.buckets and (self.shard or self.shares_any):
            total = gradients.buckets[0].totals()[-1]
            if not gradients.combining.counts_all_ranks(total, gradients.team.size):
                raise HorovodInternalError(JOINED)

    def take_gradients(self, gradients: Gradients) -> None:
        """After a round: unsets `.grad` of what this rank has not whole. May be called again."""
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
            elif self.owner_of[slot.param] == self.owner:
                continue
            slot.param.grad = slot.round_grad = None
