"""After an update: brings the elements that each owner has updated to the other ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial

import torch

from hvdlite import _core
from hvdlite.collectives.broadcast import broadcast_async_
from hvdlite.collectives.handles import Handle, synchronize
from hvdlite.errors import HorovodInternalError
from hvdlite.observe import waits
from hvdlite.ops import DTYPES
from hvdlite.optimizer.buckets.bucket import Bucket
from hvdlite.optimizer.buckets.slot import Slot, real_view
from hvdlite.optimizer.overlap import on_the_way
from hvdlite.optimizer.overlap.on_the_way import Arrival
from hvdlite.optimizer.sharding.cut_bucket import CutBucket
from hvdlite.optimizer.sharding.division import Division, ranges_in
from hvdlite.optimizer.sharding.memory import has_gaps, in_memory_order
from hvdlite.optimizer.sharding.shards import Shards
from hvdlite.own_names import own_name
from hvdlite.world.teams.team import Team


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
        operation = self._operations[0]
        if waits.observed():
            with waits.waiting(operation):
                text = operation.wait()
        else:
            text = operation.wait()
        self._is_over = True
        if text is not None:
            raise HorovodInternalError(text)


class Union:
    """Makes the parameters of one bucket whole on every rank."""

    def __init__(self) -> None:
        self._runs: list[_core.Operation] = []
        # The parameters are whole, or that has failed with this text.
        self._is_over = False
        self._text: str | None = None

    def start(self) -> None:
        """Starts to send what this rank has updated; does not block. Does nothing if it has
        started in this update."""
        raise NotImplementedError

    def wait(self) -> str | None:
        """After `start`: blocks until the parameters are whole. Returns the text of the failure, or
        None. After an interruption it goes on; when it is over, it returns the same at once, as
        the gradients' memory may be in use again."""
        if not self._is_over:
            self._text = self._runs[0].wait()
            if self._text is None:
                self._finish()
            self._is_over = True
        return self._text

    def reset(self) -> None:
        """An update begins."""
        self._runs.clear()
        self._is_over, self._text = False, None

    def _finish(self) -> None:
        """The run has ended well. May be called again."""
        raise NotImplementedError


class UnionInPlace(Union):
    """On one host: the ranks give and take the elements where the parameters lie."""

    def __init__(self, bucket: CutBucket, team: Team, name: str, shards: Shards) -> None:
        super().__init__()
        own = [
            (slot.param, offset)
            for slot, offset in zip(bucket.slots, bucket.offsets_elems, strict=True)
            if slot.param.numel() and not shards.is_shared(slot.param)
        ]
        self._params = [param for param, _ in own]
        self._offsets_elems = [offset for _, offset in own]
        flat = real_view(bucket.flat)
        dtype, cut_as = DTYPES[flat.dtype], DTYPES[bucket.wire.dtype]
        self._make_plan = partial(
            team.plan,
            *(name, dtype, _core.SUM, 0, 0, flat.numel(), 1.0, 1.0),
            form=_form_of(bucket),
            cut_as=-1 if cut_as == dtype else cut_as,
        )
        self._plan: _core.Plan | None = None
        # Of the parameters, for which the plan was made.
        self._addresses: list[int] = []
        self._memories: list[torch.Tensor] = []

    def start(self) -> None:
        if self._runs:
            return
        addresses = [param.data_ptr() for param in self._params]
        if self._plan is None or addresses != self._addresses:
            self._prepare(addresses)
        assert self._plan is not None
        self._runs.extend(map(self._plan.start, (self._memories,)))

    def _prepare(self, addresses: list[int]) -> None:
        """Makes the plan: at first, and where parameters have got other memory."""
        memories = [real_view(in_memory_order(param)).reshape(-1) for param in self._params]
        elems = 2 if self._params and self._params[0].is_complex() else 1
        begins = [offset * elems for offset in self._offsets_elems]
        extents = [
            (begin, begin + memory.numel(), memory.data_ptr())
            for begin, memory in zip(begins, memories, strict=True)
        ]
        self._plan = self._make_plan(memories, extents=extents)
        self._memories, self._addresses = memories, addresses

    def _finish(self) -> None:
        # As a copy_ would, so that autograd notices the changes.
        for param in self._params:
            torch.autograd.graph.increment_version(param)


class UnionInBucket(Union):
    """Between hosts, and of parameters on a GPU: in the memory of the gradients, which nobody needs
    after the update."""

    def __init__(self, bucket: CutBucket, team: Team, name: str, shards: Shards) -> None:
        super().__init__()
        self._bucket = bucket
        flat, wire = bucket.flat, bucket.wire
        self._flat = flat if flat.is_cpu else bucket.zeros(flat.numel(), flat.dtype, "cpu")
        memory = real_view(self._flat)
        dtype = DTYPES[memory.dtype]
        cut_as = DTYPES[wire.dtype]
        self._memory = memory
        self._plan = team.plan(
            *(name, dtype, _core.SUM, memory.data_ptr(), memory.data_ptr(), memory.numel()),
            *(1.0, 1.0, memory),
            form=_form_of(bucket),
            cut_as=-1 if cut_as == dtype else cut_as,
        )
        own = team.rank
        self._own = [_Range(*each) for each in ranges_in(bucket, own)]
        self._others = list(_written_here(bucket, shards, own))

    def start(self) -> None:
        if self._runs:
            return
        self._bucket.is_lent = True
        for each in self._own:
            self._flat[each.begin : each.end].copy_(each.values())
        self._runs.extend(map(self._plan.start, (self._memory,)))

    def wait(self) -> str | None:
        text = super().wait()
        if self._bucket.is_lent:
            self._bucket.is_lent = False
            self._bucket.give_back()
        return text

    def _finish(self) -> None:
        for each in self._others:
            each.values().copy_(self._flat[each.begin : each.end])


def _form_of(bucket: CutBucket) -> int:
    is_of_host = bucket.form == _core.PLAN_TO_HOST_OWNERS
    return _core.PLAN_UNITE_ON_HOST if is_of_host else _core.PLAN_UNITE


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


class Delivery:
    """Brings a whole parameter from its owner to every rank."""

    def __init__(
        self, param: torch.Tensor, owner: int, team: Team, name: str, shards: Shards
    ) -> None:
        self._param = param
        self._name = name
        self._shards = shards
        self._member = shards.members[owner]
        self._root = team.ranks[self._member]
        self._handles: list[Handle] = []
        self._memory = param
        self._is_direct = False
        self._is_over = False
        self._text: str | None = None

    def start(self) -> None:
        """Starts the broadcast; does not block."""
        if self._handles:
            return
        shards, param = self._shards, self._param
        self._is_direct = not shards.is_shared(param) and not has_gaps(param)
        memory = in_memory_order(param) if self._is_direct else param.detach().clone().contiguous()
        self._memory = memory
        self._handles.append(broadcast_async_(memory, self._root, self._name, shards.process_set))

    def wait(self) -> str | None:
        """After `start`: blocks until the parameter is whole. See `Union.wait`."""
        if not self._is_over:
            try:
                synchronize(self._handles[0])
                self._write()
            except HorovodInternalError as error:
                self._text = str(error)
            self._is_over, self._memory = True, self._param
        return self._text

    def _write(self) -> None:
        shards, param = self._shards, self._param
        is_far = self._member not in shards.local_members
        if not self._is_direct and (not shards.is_shared(param) or (is_far and shards.is_leader)):
            param.detach().copy_(self._memory)

    def reset(self) -> None:
        """An update begins."""
        self._handles.clear()
        self._is_over, self._text = False, None


class WholeAgain:
    """Makes parameters whole on every rank after each update."""

    def __init__(
        self, shards: Shards, division: Division, buckets: Sequence[Bucket], team: Team, name: str
    ) -> None:
        """Made anew for each division."""
        self._shards = shards
        self._name = name
        self._team = team
        self._updating = Meeting(team, own_name(name, "updating", "the start of an update of {}"))
        self._updated = Meeting(team, own_name(name, "updated", "the end of an update of {}"))
        # In the order in which forward needs them.
        self._arrivals: list[Arrival] = []
        self._transfers: list[Union | Delivery] = []
        if team.size > 1:
            self._find_transfers(division, buckets)

    def _find_transfers(self, division: Division, buckets: Sequence[Bucket]) -> None:
        shards = self._shards
        if not shards.elementwise:
            for owner, parts in enumerate(division.cut):
                for part in parts:
                    param = shards.params[part.index]
                    if not (shards.is_shared(param) and shards.owners_are_near):
                        label = self._name_of(len(self._transfers))
                        self._add([param], Delivery(param, owner, self._team, label, shards))
            return
        # Forward needs the last buckets first.
        for number, bucket in reversed(tuple(enumerate(buckets))):
            if isinstance(bucket, CutBucket) and (
                not shards.owners_are_near
                or not all(shards.is_shared(slot.param) for slot in bucket.slots)
            ):
                is_near = shards.owners_are_near and bucket.flat.is_cpu
                kind = UnionInPlace if is_near else UnionInBucket
                union = kind(bucket, self._team, self._name_of(number), shards)
                self._add([slot.param for slot in bucket.slots], union)

    def _name_of(self, transfer: int) -> str:
        return own_name(self._name, f"whole.{transfer}", "the exchange of new parameters of {}")

    def _add(self, params: Sequence[torch.Tensor], transfer: Union | Delivery) -> None:
        self._transfers.append(transfer)
        self._arrivals.append(Arrival(params, transfer, self._name))

    def reset(self) -> None:
        """Before an update."""
        for transfer in self._transfers:
            transfer.reset()
        self._updating.reset()
        self._updated.reset()

    def begin(self) -> None:
        """An update begins. If parameters are shared, blocks until every member is here."""
        if self._shards.shares_any:
            self._updating.meet()

    def run(self, watched: Collection[int] = ()) -> None:
        """Starts to make all parameters whole, and blocks until they are, except for those that
        come with watched ones alone: a read waits for these. If parameters are shared, blocks until
        all are. After an interruption it may be called again.

        watched: the ids of parameters.

        Raises:
            HorovodInternalError: It failed; on every rank.
        """
        self.begin()  # an interruption may have ended it
        shares_any = self._shards.shares_any
        later = [
            arrival
            for arrival in self._arrivals
            if not shares_any and all(id(param) in watched for param in arrival.params)
        ]
        with torch.no_grad():
            for transfer in self._transfers:
                transfer.start()
        if later:
            on_the_way.add(later)
        self._wait_for([arrival for arrival in self._arrivals if arrival not in later])
        if shares_any:
            self._updated.meet()

    def wait_for_the_rest(self) -> None:
        """Blocks until all parameters are whole that `run` has left on the way.

        Raises:
            HorovodInternalError: It failed; on every rank.
        """
        for arrival in self._arrivals:
            on_the_way.wait_for(arrival.params)

    def _wait_for(self, arrivals: Sequence[Arrival]) -> None:
        texts = [arrival.finish() for arrival in arrivals]
        text = next((text for text in texts if text is not None), None)
        if text is not None:
            raise HorovodInternalError(text)
