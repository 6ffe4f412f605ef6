"""A bucket of gradients on a GPU: reduced there, by NCCL, or else through host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hvdlite import _core
from hvdlite.compression import Compressor
from hvdlite.gpu import goes_by_gpu
from hvdlite.observe import waits
from hvdlite.ops import DTYPES, ReduceOp
from hvdlite.optimizer.buckets.bucket import Bucket
from hvdlite.optimizer.buckets.layout import BucketLayout
from hvdlite.optimizer.buckets.pages import Pages
from hvdlite.optimizer.buckets.positions import Position
from hvdlite.optimizer.buckets.slot import Slot
from hvdlite.world.teams.team import Team

if TYPE_CHECKING:
    from hvdlite.gpu.launches import Launch
    from hvdlite.gpu.transfer import Transfer
    from hvdlite.optimizer.buckets.round_record import RoundRecord


class GpuBucket(Bucket):
    """It carries nothing beside gradients: see `RoundRecord`."""

    in_gpu_queue = True
    # Set by the record of the buckets on GPUs, with its number there.
    record: RoundRecord
    number: int
    # The allreduce of a run.
    request: _core.Posting

    def __init__(
        self,
        layout: BucketLayout,
        slots: Sequence[Slot],
        compression: type[Compressor],
        pages: Pages | None = None,
    ) -> None:
        super().__init__(layout, slots, compression, pages)
        self.takes_copies = False
        # What has become of the allreduce in this round; empty until it is launched.
        self.transfers: list[Launch | Transfer] = []
        # Gradients that have come, and are not in their places; and the streams that the places
        # wait for.
        self.deferred: list[tuple[Slot, torch.Tensor]] = []
        self._streams: set[int] = set()

    def make_plan(
        self,
        team: Team,
        name: str,
        op: ReduceOp,
        prescale: float,
        post: float,
        weighs: bool,
    ) -> None:
        wire = self.wire
        self.request = _core.posting(
            *(_core.ALLREDUCE, name, False, DTYPES[wire.dtype], wire, wire, op),
            prescale=prescale,
            postscale=post,
        )

    def defer(self, slot: Slot, grad: torch.Tensor) -> None:
        """A gradient has come, which `gather` copies to its place: one call for all of a bucket, as
        each call costs more than a copy. Until then it stays `.grad`."""
        self.deferred.append((slot, grad))

    def note_stream(self) -> None:
        """The calling thread's current stream makes a gradient, or copies it to its place."""
        self._streams.add(self.record.devices.stream(self.flat.device))

    def gather(self) -> None:
        device, devices = self.flat.device, self.record.devices
        own = devices.stream(device)
        if others := self._streams - {own}:
            for stream in others:
                devices.wait_for_stream(device, stream)
            for _, grad in self.deferred:
                devices.keep(grad)
        self._streams = {own} if self._streams else set()
        if not self.deferred:
            return
        places = [slot.view for slot, _ in self.deferred]
        torch._foreach_copy_(places, [grad for _, grad in self.deferred])  # type: ignore[arg-type]
        for slot, grad in self.deferred:
            # Unless a hook of the user's has put something else there.
            if slot.param.grad is grad:
                slot.param.grad = slot.view
            slot.round_grad = slot.view
        self.deferred.clear()

    def start(self, position: Position) -> None:
        if not self.runs:
            self.gather()
            self._load()
            self.runs.append(self.request)
        self.record.begin(position)
        self.record.launch()

    def wait(self) -> str | None:
        text = self.record.launch(wait=True)
        if text is not None:
            return text
        transfer = self.transfers[0]
        if waits.observed():
            with waits.waiting(transfer):
                text = transfer.wait()
        else:
            text = transfer.wait()
        if text is None:
            self._unload()
        return text

    def reset(self) -> None:
        super().reset()
        self.deferred.clear()
        self._streams.clear()
        self.transfers.clear()

    def totals(self) -> list[float]:
        return self.record.totals(self.number)


def plain_bucket(
    layout: BucketLayout,
    slots: Sequence[Slot],
    compression: type[Compressor],
    pages: Pages | None = None,
) -> Bucket:
    """A bucket of which every rank gets all, where its gradients lie."""
    on_gpu = goes_by_gpu(slots[layout.members[0]].param)
    return (GpuBucket if on_gpu else Bucket)(layout, slots, compression, pages)
