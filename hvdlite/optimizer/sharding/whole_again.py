"""After an update: brings the elements that each owner has updated to the other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hvdlite import _core
from hvdlite.collectives.broadcast import broadcast_async_
from hvdlite.collectives.handles import synchronize
from hvdlite.errors import HorovodInternalError
from hvdlite.ops import DTYPES
from hvdlite.optimizer.buckets.bucket import Bucket, Slot, real_view
from hvdlite.optimizer.sharding.cut_bucket import CutBucket
from hvdlite.optimizer.sharding.division import Division, ranges_in
from hvdlite.optimizer.sharding.memory import has_gaps, in_memory_order
from hvdlite.optimizer.sharding.shards import Shards
from hvdlite.world.teams import Team


class Meeting:
    """A barrier of the team, once per update; interrupted, it goes on."""

    def __init__(self, team: Team, name: str) -> None:
        self._team = team
        self._posting = _core.posting(_core.BARRIER, name, False, _core.UINT8)
        self._operations: list[_core.Operation] = []
        self._is_over = False

    def reset(self) -> None:
        """An update begins."""
        self._operations, self._is_over = [], False

    def meet(self) -> None:
        """Blocks until every member is here. Does nothing if they have met in this update.

        Raises:
            HorovodInternalError: A member has left.
        """
        if self._is_over:
            return
        if not self._operations:
            # No bytecode between post and store, so no signal handler can raise there.
            self._operations.extend(map(self._team.post, (self._posting,)))
        text = self._operations[0].wait()
        self._is_over = True
        if text is not None:
            raise HorovodInternalError(text)


class Union:
    """Makes the parameters of one bucket whole on every rank. Their gradients' memory carries
    them: nobody needs the gradients after the update."""

    def __init__(self, bucket: CutBucket, team: Team, name: str, shards: Shards) -> None:
        self._bucket = bucket
        flat, wire = bucket.flat, bucket.wire
        self._flat = flat if flat.is_cpu else bucket.zeros(flat.numel(), flat.dtype, "cpu")
        memory = real_view(self._flat)
        of_host = bucket.form == _core.PLAN_TO_HOST_OWNERS
        dtype = DTYPES[memory.dtype]
        cut_as = DTYPES[wire.dtype]
        self._memory = memory
        self._plan = team.engine.plan(
            *(name, dtype, _core.SUM, memory.data_ptr(), memory.data_ptr(), memory.numel()),
            *(1.0, 1.0, memory),
            form=_core.PLAN_UNITE_ON_HOST if of_host else _core.PLAN_UNITE,
            cut_as=-1 if cut_as == dtype else cut_as,
        )
        self._runs: list[_core.Operation] = []
        # The parameters are whole, or that has failed with this text.
        self._is_over = False
        self._text: str | None = None
        own = team.rank
        self._own = [_Range(*each) for each in ranges_in(bucket, own)]
        self._others = list(_written_here(bucket, shards, own))

    def start(self) -> None:
        """Starts to send what this rank has updated; does not block."""
        if self._runs:
            return
        self._bucket.is_lent = True
        for each in self._own:
            self._flat[each.begin : each.end].copy_(each.values())
        self._runs.extend(map(self._plan.start, (self._memory,)))

    def wait(self) -> str | None:
        """After `start`: blocks until the parameters are whole. Returns the text of the failure, or
        None. After an interruption it goes on; when it is over, it returns the same at once, as
        the gradients' memory may be in use again."""
        if not self._is_over:
            self._text = self._runs[0].wait()
            if self._text is None:
                for each in self._others:
                    each.values().copy_(self._flat[each.begin : each.end])
            self._is_over, self._bucket.is_lent = True, False
            self._bucket.give_back()
        return self._text

    def reset(self) -> None:
        """An update begins."""
        self._runs.clear()
        self._is_over, self._text = False, None


class _Range:
    """Some elements of a parameter, and their place in the flat memory of the bucket."""

    def __init__(self, slot: Slot, offset: int, begin: int, end: int) -> None:
        self._slot = slot
        self._offset = offset
        self.begin = begin
        self.end = end

    def values(self) -> torch.Tensor:
        return in_memory_order(self._slot.param)[
            self.begin - self._offset : self.end - self._offset
        ]


def _written_here(bucket: CutBucket, shards: Shards, own: int) -> Iterator[_Range]:
    """The elements that this rank copies from the united memory to the parameters: those of other
    owners; of shared parameters a part of those that come from other hosts."""
    local = shards.local_members
    for number, member in enumerate(shards.members):
        if member == own:
            continue
        for each in ranges_in(bucket, member):
            if not shards.is_shared(each[0].param) or (
                member not in local and local[number % len(local)] == own
            ):
                yield _Range(*each)


class WholeAgain:
    """Makes parameters whole on every rank after each update."""

    def __init__(
        self, shards: Shards, division: Division, buckets: Sequence[Bucket], team: Team, name: str
    ) -> None:
        """Made anew for each division."""
        self._shards = shards
        self._name = name
        self._process_set = shards.process_set
        self._team = team
        self._updating = Meeting(team, f"{name}.updating")
        self._updated = Meeting(team, f"{name}.updated")
        # Forward needs the last buckets first.
        self._unions: list[Union] = []
        self._dealt: list[tuple[int, torch.Tensor]] = []
        if team.size == 1:
            return
        if not shards.elementwise:
            for owner, parts in enumerate(division.cut):
                for part in parts:
                    param = shards.params[part.index]
                    if not (shards.is_shared(param) and shards.owners_are_near):
                        self._dealt.append((owner, param))
            return
        for number, bucket in reversed(tuple(enumerate(buckets))):
            if isinstance(bucket, CutBucket) and (
                not shards.owners_are_near
                or not all(shards.is_shared(slot.param) for slot in bucket.slots)
            ):
                self._unions.append(Union(bucket, team, f"{name}.whole.{number}", shards))

    def reset(self) -> None:
        """Before an update."""
        for union in self._unions:
            union.reset()
        self._updating.reset()
        self._updated.reset()

    def begin(self) -> None:
        """An update begins. If parameters are shared, blocks until every member is here."""
        if self._shards.shares_any:
            self._updating.meet()

    def run(self) -> None:
        """Blocks until all parameters are whole. After an interruption it may be called again.

        Raises:
            HorovodInternalError: It failed; on every rank.
        """
        self.begin()  # an interruption may have ended it
        self.start()
        with torch.no_grad():
            self._broadcast()
        self.wait()
        if self._shards.shares_any:
            self._updated.meet()

    def start(self) -> None:
        """Starts all unions, in the order in which forward needs them; does not block."""
        with torch.no_grad():
            for union in self._unions:
                union.start()

    def wait(self) -> None:
        """After `start`: blocks until all unions are over.

        Raises:
            HorovodInternalError: One has failed; on every rank.
        """
        with torch.no_grad():
            texts = [union.wait() for union in self._unions]
        text = next((text for text in texts if text is not None), None)
        if text is not None:
            raise HorovodInternalError(text)

    def _broadcast(self) -> None:
        """Whole parameters, each from its owner."""
        shards = self._shards
        started = []
        for number, (owner, param) in enumerate(self._dealt):
            root = self._team.ranks[shards.members[owner]]
            is_direct = not shards.is_shared(param) and not has_gaps(param)
            memory = in_memory_order(param) if is_direct else param.detach().clone().contiguous()
            name = f"{self._name}.whole.{number}"
            handle = broadcast_async_(memory, root, name, self._process_set)
            started.append((owner, param, memory, is_direct, handle))
        for owner, param, memory, is_direct, handle in started:
            synchronize(handle)
            is_far = shards.members[owner] not in shards.local_members
            if not is_direct and (not shards.is_shared(param) or (is_far and shards.is_leader)):
                param.detach().copy_(memory)
