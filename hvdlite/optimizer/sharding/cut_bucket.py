"""A bucket whose sums each rank gets a part of."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdlite import _core
from hvdlite.compression import Compressor
from hvdlite.ops import DTYPES, ReduceOp
from hvdlite.optimizer.buckets.bucket import Bucket
from hvdlite.optimizer.buckets.layout import BucketLayout
from hvdlite.optimizer.buckets.pages import Pages
from hvdlite.optimizer.buckets.positions import ELEMS as POSITION_ELEMS
from hvdlite.optimizer.buckets.slot import Slot
from hvdlite.own_names import own_name
from hvdlite.world.teams.team import Team


class CutBucket(Bucket):
    """Its gradients are reduced to their owners; those on a GPU pass through host memory.
    Presences, weights and position, which every rank reads, are reduced in `tail`, beside it.

    Its place in the flat memory stays free: with it the buffer has the size that it has unsharded,
    so that the sums are rounded in the same order between hosts.
    """

    def __init__(
        self,
        layout: BucketLayout,
        slots: Sequence[Slot],
        compression: type[Compressor],
        pages: Pages | None,
        form: int,
    ) -> None:
        """form: PLAN_TO_OWNERS or PLAN_TO_HOST_OWNERS."""
        super().__init__(layout, slots, compression, pages)
        self.form = form
        self.offsets_elems = layout.offsets_elems
        count = len(self.slots) + 1
        sizes = [count, layout.weights_elems, POSITION_ELEMS]
        self.tail = torch.zeros(sum(sizes), dtype=self.wire.dtype, device="cpu")
        self.mask, self.weights, self.position = torch.split(self.tail, sizes)
        self._team: Team | None = None

    def make_plan(
        self,
        team: Team,
        name: str,
        op: ReduceOp,
        prescale: float,
        post: float,
        weighs: bool,
    ) -> None:
        self._team = team
        if self.plans:
            return
        self.weighs = weighs
        tail_name = own_name(name, "tail", "what goes with {}")
        self.plans += [
            team.plan(
                *(label, DTYPES[memory.dtype], op, memory.data_ptr(), memory.data_ptr()),
                *(memory.numel(), prescale, post, memory),
                form=form,
                weighted=weighted,
            )
            for label, memory, form, weighted in (
                (name, self.wire, self.form, self.weighted_elems()),
                (tail_name, self.tail, _core.PLAN_WHOLE, 0),
            )
        ]

    def memories(self) -> Sequence[torch.Tensor]:
        return self.wire, self.tail

    def wait(self) -> str | None:
        texts = super().wait(), self.runs[1].wait()
        return texts[0] or texts[1]

    def reduced(self) -> Sequence[torch.Tensor]:
        assert self._team is not None
        return [self.gradients[begin:end] for begin, end in self.owned(self._team.rank)]

    def owned(self, member: int) -> list[tuple[int, int]]:
        """The elements of `flat` of which a member gets the sums, ascending."""
        assert self._team is not None
        wire = self.wire
        ranges = self._team.engine.owned(wire.numel(), DTYPES[wire.dtype], self.form, member)
        if not self.flat.is_complex():
            return ranges
        # A complex number is never cut in two, as all cuts are at cache lines.
        assert all(end % 2 == 0 or end == wire.numel() for _, end in ranges)
        return [(begin // 2, -(-end // 2)) for begin, end in ranges]
