"""One step of an optimizer whose update is divided.

    begin:   every rank is here; the division is that of the present buckets, and the state follows
    own:     the wrapped optimizer updates views of what this rank owns
    finish:  the parameters are whole again on every rank, or wait for their values when the next
             forward reads them

Shared parameters change only between `begin` and the end of `finish`, where all ranks meet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from hvdlite.errors import HorovodInternalError
from hvdlite.optimizer.buckets.slot import Slot
from hvdlite.optimizer.overlap import in_flight
from hvdlite.optimizer.overlap.in_flight import Arrival
from hvdlite.optimizer.overlap.watching import Watching
from hvdlite.optimizer.reducer import Reducer
from hvdlite.optimizer.sharding.arrivals import Barrier, arrivals_of
from hvdlite.optimizer.sharding.cut_bucket import CutBucket
from hvdlite.optimizer.sharding.division import Division, Part
from hvdlite.optimizer.sharding.memory import laid_out_as
from hvdlite.optimizer.sharding.part_states import PartStates
from hvdlite.optimizer.sharding.shards import Shards
from hvdlite.optimizer.sharding.words import INTERRUPTED
from hvdlite.own_names import own_name
from hvdlite.shared import require_shared


class Update:
    """The updates of one optimizer, one at a time."""

    def __init__(
        self, shards: Shards, states: PartStates, watching: Watching | None = None
    ) -> None:
        """watching: the model through which the next forward reads parameters that are still on the
        way; None: all are whole at the end of the update."""
        self.shards = shards
        self._states = states
        self._watching = watching
        # Of the last update; and what makes the parameters whole again after one.
        self.division: Division | None = None
        self._arrivals: Sequence[Arrival] = ()
        # If parameters are shared, where all ranks meet before the first one updates, and after the
        # last one has.
        self._barriers: Sequence[Arrival] = ()
        # `begin` was called, and the parameters are not whole yet; or the step has not returned: an
        # exception has ended it if that stays.
        self._is_unfinished = self._is_open = False
        # What has a gradient inside the wrapped step only.
        self._with_gradient: list[torch.Tensor] = []

    def begin(self, reducer: Reducer) -> None:
        """Every rank calls it, after the gradients are reduced. Blocks if parameters are shared, or
        in flight from the last update.

        Raises:
            RuntimeError: A parameter was shared, and has other memory now; or an exception has
                ended the last update on this rank, and nothing has given it up since.
            HorovodInternalError: Parameters did not come.
        """
        if self._is_open:
            self.finish()
            raise RuntimeError(INTERRUPTED)
        self.wait_for_parameters()
        reducer.learn_if_due()
        gradients, shards = reducer.gradients, self.shards
        division = self._states.divide(gradients)
        require_shared((slot.name, slot.param) for slot in gradients.slots)
        if division is not self.division:
            assert gradients.team is not None
            name = gradients.name
            ends = {"updating": "the start of an update of {}", "updated": "the end of one of {}"}
            self._barriers = [
                Barrier(gradients.team, own_name(name, end, words))
                for end, words in ends.items()
                if shards.shares_any
            ]
            self._arrivals = arrivals_of(division, self._states.params, gradients, shards)
            self.division = division
        for each in (*self._barriers, *self._arrivals):
            each.reset()
        self._is_open = self._is_unfinished = True
        _await(self._barriers[:1])
        self._states.follow(division, gradients.name)
        if shards.elementwise:
            self._set_gradients(reducer, division)

    def end_own(self, may_overlap: bool) -> None:
        """The wrapped optimizer has updated what this rank owns. may_overlap: see `finish`."""
        while self._with_gradient:
            self._with_gradient.pop().grad = None
        self.finish(may_overlap)

    def finish(self, may_overlap: bool = False) -> None:
        """Makes all parameters whole; does nothing if the update is finished. Where an exception
        has ended an update on this rank, the others wait for this.

        may_overlap: If no parameters are shared, those that a model is watched for may be on the
            way when this returns: a read waits for these. Otherwise it blocks until all are whole.

        Raises:
            HorovodInternalError: It failed; on every rank.
        """
        if not self._is_unfinished:
            return
        _await(self._barriers[:1])  # an interruption may have ended it
        watched: Collection[int] = ()
        if may_overlap and self._watching is not None and not self._barriers:
            watched = self._watching.params()
        later = [
            arrival
            for arrival in self._arrivals
            if all(id(param) in watched for param in arrival.params)
        ]
        with torch.no_grad():
            for arrival in self._arrivals:
                arrival.start()
        if later:
            in_flight.add(later)
        _await([arrival for arrival in self._arrivals if arrival not in later])
        _await(self._barriers[1:])
        self._is_unfinished = False

    def end(self, may_overlap: bool = False) -> None:
        """The step returns, or is given up. may_overlap: see `finish`."""
        self.finish(may_overlap)
        self._is_open = False

    def wait_for_parameters(self) -> None:
        """Blocks until no parameters are in flight from the last update.

        Raises:
            HorovodInternalError: They did not come; on every rank.
        """
        for arrival in self._arrivals:
            in_flight.wait_for(arrival.params)

    def gradients_of(
        self, reducer: Reducer, param: torch.Tensor
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """What this rank has of a parameter's reduced gradient: begin, end, values."""
        own = list(self._own_slots(reducer))
        if not any(each is param for each in self._states.params):
            raise ValueError(
                "sharded_grad: the tensor is not a parameter of this optimizer; pass one of "
                "model.parameters()"
            )
        for part, slot in own:
            if slot.param is param and (grad := _gradient_of(slot, part)) is not None:
                yield part.begin, part.end, grad

    def owned_gradients(self, reducer: Reducer) -> Iterator[tuple[int, torch.Tensor, bool]]:
        """All reduced gradients that this rank has, whole or in part: the parameter's number, the
        values, and whether this owner is the first that has them."""
        for part, slot in self._own_slots(reducer):
            grad = _gradient_of(slot, part) if self.shards.elementwise else slot.param.grad
            if grad is not None:
                yield part.index, grad, True
        for index in self._states.divide(reducer.gradients).undivided:
            grad = self._states.params[index].grad
            if grad is not None:
                yield index, grad, self.shards.owner == 0

    def _own_slots(self, reducer: Reducer) -> Iterator[tuple[Part, Slot]]:
        """What this rank owns of the divided parameters that have gradients."""
        reducer.learn_if_due()
        division = self._states.divide(reducer.gradients)
        slots = {id(slot.param): slot for slot in reducer.gradients.slots}
        for part in division.cut[self.shards.owner]:
            slot = slots.get(id(self._states.params[part.index]))
            if slot is not None and part.index not in division.undivided:
                yield part, slot

    def _set_gradients(self, reducer: Reducer, division: Division) -> None:
        slots = {id(slot.param): slot for slot in reducer.gradients.slots}
        for part in division.own:
            slot = slots.get(id(self._states.params[part.index]))
            if slot is None:
                continue
            is_divided = part.index not in division.undivided
            # A parameter without elements has a state, too, in torch.
            is_empty = slot.in_parts and not is_divided and slot.has_result()
            if is_divided or is_empty:
                key = self._states.key_of(division, part)
                key.grad = torch.zeros_like(key) if is_empty else _gradient_of(slot, part)
                self._with_gradient.append(key)


def _gradient_of(slot: Slot, part: Part) -> torch.Tensor | None:
    bucket = slot.bucket
    if isinstance(bucket, CutBucket):
        offset = bucket.offsets_elems[slot.position]
        return bucket.flat[offset + part.begin : offset + part.end] if slot.has_result() else None
    grad = slot.param.grad
    if grad is None:
        return None
    return laid_out_as(grad, slot.param.stride())[part.begin : part.end]


def _await(arrivals: Sequence[Arrival]) -> None:
    for arrival in arrivals:
        arrival.start()
    texts = [arrival.finish() for arrival in arrivals]
    text = next((text for text in texts if text is not None), None)
    if text is not None:
        raise HorovodInternalError(text)
