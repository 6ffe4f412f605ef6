"""What travels with a round beside its gradients, where these are on GPUs: through host memory.

So no rank waits for its device to learn it, and no device for a rank. There are two small sums over
the ranks:

- **begin**, posted with the first bucket: which ranks can launch, and their weights. Nothing is
  launched before all ranks have posted it. If all can, every bucket is launched as soon as it is
  complete, without another word. If one has joined, or has no group, the GPU queue agrees on each
  bucket.
- **end**, posted with the last bucket: the position of the round, which gradients each rank has,
  and whose launches have failed. `backward()` returns when all ranks have posted it.

Buckets in host memory carry the same in their last elements instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from hvdlite.collectives.differing_ranks import ranks_in_words
from hvdlite.collectives.host_sum import HostSum
from hvdlite.gpu.launches import Launches
from hvdlite.optimizer.buckets.positions import ELEMS as POSITION_ELEMS
from hvdlite.optimizer.buckets.positions import Position, is_one, one_hots
from hvdlite.own_names import own_name, words_of
from hvdlite.world.teams.team import Team

if TYPE_CHECKING:
    from hvdlite.optimizer.buckets.gpu_bucket import GpuBucket

# In place of a one: the gradient is of another form than its place is for.
_MISPLACED = 1 << 32


class RoundRecord:
    """The record of one optimizer, made with its buckets on GPUs; every member makes it."""

    def __init__(
        self,
        team: Team,
        name: str,
        buckets: Sequence[GpuBucket],
        averages: bool,
        former: RoundRecord | None,
    ) -> None:
        """averages: whether gradients are averaged, and masks with them. former: the record of
        the optimizer's former buckets, whose communicator goes on."""
        self._team = team
        self._launches: Launches
        if former is not None and former._team is team:
            self._launches = former._launches
        else:
            self._launches = Launches(team, name)
        self._name = name
        self.devices = self._launches.devices
        self._buckets = buckets
        self._averages = averages
        # How many can launch, how many are there, and by member the bits of its weight.
        self._begin = HostSum(
            team, own_name(name, "begin", "the start of a backward pass of {}"), 2 + team.size
        )
        # The position; by member whether a launch has failed; by bucket its masks, and a one
        # for the rank.
        self._masks: list[slice] = []
        begin = POSITION_ELEMS + team.size
        for bucket in buckets:
            bucket.record, bucket.number = self, len(self._masks)
            self._masks.append(slice(begin, begin + len(bucket.slots) + 1))
            begin = self._masks[-1].stop
        self._end = HostSum(team, own_name(name, "end", "the end of a backward pass of {}"), begin)
        self._one_hots = one_hots(self._end.numbers)
        self._devices = {bucket.wire.device for bucket in buckets}
        # Whether launches need no agreement in this round; None: not known yet.
        self._at_once: bool | None = None
        # Set when all buckets have started.
        self._position: Position | None = None

    def reset(self) -> None:
        """Prepares for the next round; nothing of this one is in flight."""
        self._launches.close_round()
        self._begin.forget()
        self._end.forget()
        self._at_once = self._position = None

    def begin(self, position: Position) -> None:
        """The first bucket starts. Does not block; does nothing if it was called in this round."""
        if self._begin.posted():
            return
        numbers = self._begin.numbers.zero_()
        numbers[0] = int(self._launches.open_round(self._devices))
        numbers[1] = 1
        numbers[2:].view(torch.float64)[self._team.rank] = position.weight or 0.0
        self._begin.post()

    def launch(self, wait: bool = False) -> str | None:
        """Launches the buckets that have started, in their order, once all ranks have begun.

        wait: blocks until they have. Returns the text of the failure if they can't, else None.
        """
        if self._at_once is None:
            if not (wait or self._begin.poll()):
                return None
            text = self._begin.wait()
            if text is not None:
                return text
            can_launch, are_there = self._begin.numbers[:2].tolist()
            is_captured = self.devices.is_capturing()
            if are_there == self._team.size > can_launch and not is_captured:
                self._launches.make(next(iter(self._devices)))
            self._at_once = can_launch == self._team.size
            if is_captured and not self._at_once:
                # The GPU queue's thread would launch outside the graph.
                raise RuntimeError(
                    f"{words_of(self._name)}: backward() can be captured in a CUDA graph only once "
                    "the ranks have a communicator for these gradients, which takes some steps, by "
                    "NCCL, and on one GPU per rank; run a few steps before the capture, or capture "
                    "the forward alone (torch.cuda.make_graphed_callables)"
                )
        for bucket in self._buckets:
            if not bucket.runs:
                return None
            if not bucket.transfers:
                start = partial(self._launches.start, at_once=self._at_once)
                # One call into C launches and notes it: no signal's exception comes between.
                bucket.transfers.extend(map(start, (bucket.request,), (bucket.wire,)))
        if self._position is not None:
            self._post_end(self._position)
        return None

    def end(self, position: Position) -> None:
        """The last bucket has started. Does not block; may be called again."""
        self._position = position
        self.launch()

    def _post_end(self, position: Position) -> None:
        """Everything is launched, or has failed to."""
        if self._end.posted():
            return
        numbers = self._end.numbers.zero_()
        numbers[:POSITION_ELEMS] = self._one_hots[position.row()]
        numbers[POSITION_ELEMS + self._team.rank] = int(bool(self._failure()))
        for bucket, place in zip(self._buckets, self._masks, strict=True):
            masks = numbers[place].fill_(1)
            for index in bucket.absent:
                masks[index] = 0
            for index in bucket.misplaced:
                masks[index] = _MISPLACED
        self._end.post()

    def _failure(self) -> str | None:
        """The text of a launch of this round that has failed here, for which the others wait."""
        if not self._at_once:
            return None
        transfers = (transfer for bucket in self._buckets for transfer in bucket.transfers)
        return next((each.failure for each in transfers if each.failure), None)

    def forget(self) -> None:
        """There will be no more rounds."""
        self._launches.end()

    # What carries the position of a round, like a bucket in host memory.

    def has_position(self) -> bool:
        """Whether the position is on its way."""
        return self._end.posted()

    def ends_within(self, limit_s: float) -> bool:
        """Whether all ranks have posted everything by then. Blocks for so long at most."""
        # Other ranks may wait for launches in a round that they give up.
        self.launch()
        if not self._end.posted() and self._begin.ends_within(limit_s):
            self.launch()
        if self._end.posted():
            return self._end.ends_within(limit_s)
        return self._begin.poll()  # it has failed

    def wait(self) -> str | None:
        """Blocks until all ranks have posted everything. Returns the text of the failure, or None.
        May be called again."""
        text = self.launch(wait=True) or self._end.wait()
        self._launches.close_round()
        if text is None:
            failed = self._end.numbers[POSITION_ELEMS:][: self._team.size].tolist()
            ranks = [rank for rank, has in zip(self._team.ranks, failed, strict=True) if has]
            if not ranks:
                return None
            text = self._failure() or (
                f"{words_of(self._name)}: gradients could not be reduced on the GPU, as a launch "
                f"has failed on {ranks_in_words(ranks)}, whose error says why"
            )
        # What was launched waits on the device for ranks that do not come.
        self._launches.end(patience_s=0.0)
        return text

    def positions_differ(self, or_are: bool = False) -> bool:
        """After `wait`. See `Bucket.positions_differ`."""
        if not self._end.posted() or self._end.wait() is not None:
            return False
        return or_are or not is_one(self._end.numbers[:POSITION_ELEMS])

    def total_weight(self) -> float:
        """After `wait`: the sum of the ranks' weights, rounded once."""
        return math.fsum(self._weights())

    def largest_weight(self) -> float:
        """After `wait`."""
        return max(self._weights())

    def _weights(self) -> list[float]:
        return self._begin.numbers[2:].view(torch.float64).tolist()

    def totals(self, number: int) -> list[float]:
        """After `wait`, of a bucket. See `Bucket.totals`."""
        divisor = self._team.size if self._averages else 1
        sums = self._end.numbers[self._masks[number]].tolist()
        return [math.inf if each >= _MISPLACED else each / divisor for each in sums]
