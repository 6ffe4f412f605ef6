"""One step of an optimizer whose update is divided.

    begin:   every rank is here; the division is that of the present buckets
    own:     the wrapped optimizer updates views of what this rank owns
    finish:  the parameters are whole again on every rank, or wait for their values when the next
             forward reads them

Shared parameters change only between `begin` and the end of `finish`, where all ranks meet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hvdlite.optimizer.buckets.slot import Slot
from hvdlite.optimizer.overlap.watching import Watching
from hvdlite.optimizer.reducer import Reducer
from hvdlite.optimizer.sharding.cut import Part
from hvdlite.optimizer.sharding.cut_bucket import CutBucket
from hvdlite.optimizer.sharding.division import Division
from hvdlite.optimizer.sharding.memory import in_memory_order, laid_out_as
from hvdlite.optimizer.sharding.shards import Shards
from hvdlite.optimizer.sharding.whole_again import WholeAgain
from hvdlite.optimizer.sharding.words import interrupted
from hvdlite.shared import require_shared


class Update:
    """The updates of one optimizer, one at a time."""

    def __init__(self, shards: Shards, watching: Watching | None = None) -> None:
        """watching: the model through which the next forward reads parameters that are still on the
        way; None: all are whole at the end of the update."""
        self.shards = shards
        self._watching = watching
        self.division: Division | None = None
        # What this rank owns by the division, as the wrapped optimizer is given it.
        self.portions: tuple[Part, ...] = ()
        self._whole_again: WholeAgain | None = None
        # Set while a step is not at its end.
        self._unfinished: WholeAgain | None = None
        # `begin` was called, and the step has not returned: an exception has ended it if it stays.
        self._is_open = False
        # By a parameter's id, begin and end: what the wrapped optimizer updates, and by which its
        # state is kept. Beside it the parameter, which so keeps its id.
        self._views: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        # Parameters without elements, which have a gradient inside the wrapped step only.
        self._empty: list[torch.Tensor] = []

    def begin(self, reducer: Reducer) -> None:
        """Every rank calls it, after the gradients are reduced. Blocks if parameters are shared, or
        on the way from the last update.

        Raises:
            RuntimeError: A parameter was shared, and has other memory now; or an exception has
                ended the last update on this rank, and nothing has given it up since.
            HorovodInternalError: Parameters did not come.
        """
        if self._is_open:
            self.finish()
            raise RuntimeError(interrupted())
        self.wait_for_parameters()
        shards, gradients = self.shards, reducer.gradients
        reducer.learn_if_due()
        assert gradients.team is not None
        division = shards.divide(gradients)
        require_shared((slot.name, slot.param) for slot in gradients.slots)
        if division is not self.division:
            self._whole_again = WholeAgain(
                shards, division, gradients.buckets, gradients.team, gradients.name
            )
            self.portions = shards.portions(division.own)
            self.division = division
        assert self._whole_again is not None
        self._whole_again.reset()
        self._is_open, self._unfinished = True, self._whole_again
        self._whole_again.begin()
        self._set_gradients(reducer)

    def own_by_group(self, groups: list[dict[str, Any]]) -> list[list[torch.Tensor]]:
        """By group, what this rank updates."""
        assert self.division is not None
        shards = self.shards
        by_index: dict[int, list[torch.Tensor]] = {}
        for part in self.portions:
            by_index.setdefault(part.index, []).append(
                self.key_of(self.shards.params[part.index], part)
            )
        divided = {part.index for parts in self.division.cut for part in parts}
        result = []
        index = 0
        for group in groups:
            own: list[torch.Tensor] = []
            for param in group["params"]:
                if index in divided:
                    own += by_index.get(index, ())
                elif not param.numel() or not shards.is_shared(param) or shards.is_leader:
                    # (Of one without elements every rank has the state.)
                    own.append(param)
                index += 1
            result.append(own)
        return result

    def end_own(self, may_overlap: bool) -> None:
        """The wrapped optimizer has updated what this rank owns. may_overlap: see `finish`."""
        for view, _ in self._views.values():
            view.grad = None
        for param in self._empty:
            param.grad = None
        self.finish(may_overlap)

    def finish(self, may_overlap: bool = False) -> None:
        """Does nothing if the update is finished. Where an exception has ended an update on this
        rank, the others wait for this.

        may_overlap: What a model is watched for may be on the way when this returns. Otherwise it
            blocks until the parameters are whole.
        """
        if self._unfinished is not None:
            watching = self._watching if may_overlap else None
            self._unfinished.run(watching.params() if watching is not None else ())
            self._unfinished = None

    def end(self, may_overlap: bool = False) -> None:
        """The step returns, or is given up. may_overlap: see `finish`."""
        self.finish(may_overlap)
        self._is_open = False

    def wait_for_parameters(self) -> None:
        """Blocks until no parameters are on the way from the last update.

        Raises:
            HorovodInternalError: They did not come; on every rank.
        """
        if self._whole_again is not None:
            self._whole_again.wait_for_the_rest()

    def key_of(self, param: torch.Tensor, part: Part) -> torch.Tensor:
        """By what the wrapped optimizer keeps the state of a part of a parameter."""
        if not self.shards.elementwise:
            return param
        memory = in_memory_order(param)[part.begin : part.end]
        key = (id(param), part.begin, part.end)
        known = self._views.get(key)
        if known is None:
            self._views[key] = memory, param
            return memory
        view = known[0]
        if view.data_ptr() != memory.data_ptr() or view.dtype != memory.dtype:
            # The parameter has got other memory.
            view.grad = None
            view.data = memory
        return view

    def gradients_of(
        self, reducer: Reducer, param: torch.Tensor
    ) -> Iterator[tuple[int, int, torch.Tensor]]:
        """What this rank has of a parameter's reduced gradient: begin, end, values."""
        reducer.learn_if_due()
        division = self.shards.divide(reducer.gradients)
        index = next((i for i, p in enumerate(self.shards.params) if p is param), None)
        if index is None:
            raise ValueError(
                "sharded_grad: the tensor is not a parameter of this optimizer; pass one of "
                "model.parameters()"
            )
        slot = next((slot for slot in reducer.gradients.slots if slot.param is param), None)
        for part in division.own:
            if part.index == index and slot is not None:
                grad = self._gradient_of(reducer, slot, part)
                if grad is not None:
                    yield part.begin, part.end, grad

    def owned_gradients(self, reducer: Reducer) -> Iterator[tuple[int, torch.Tensor, bool]]:
        """All reduced gradients that this rank has, whole or in part: the parameter's number, the
        values, and whether this owner is the first that has them."""
        reducer.learn_if_due()
        division = self.shards.divide(reducer.gradients)
        slots = {id(slot.param): slot for slot in reducer.gradients.slots}
        for part in division.own:
            slot = slots.get(id(self.shards.params[part.index]))
            if slot is None:
                continue
            is_whole = not self.shards.elementwise
            grad = slot.param.grad if is_whole else self._gradient_of(reducer, slot, part)
            if grad is not None:
                yield part.index, grad, True
        divided = {part.index for parts in division.cut for part in parts}
        for index, param in enumerate(self.shards.params):
            if index not in divided and param.grad is not None:
                yield index, param.grad, self.shards.owner == 0

    def _set_gradients(self, reducer: Reducer) -> None:
        assert self.division is not None
        if not self.shards.elementwise:
            return
        slots = {id(slot.param): slot for slot in reducer.gradients.slots}
        # In torch they have a state, too.
        self._empty = [
            slot.param
            for slot in slots.values()
            if slot.in_parts and not slot.param.numel() and slot.has_result()
        ]
        for param in self._empty:
            param.grad = torch.zeros_like(param)
        for part in self.portions:
            slot = slots.get(id(self.shards.params[part.index]))
            if slot is not None:
                self.key_of(self.shards.params[part.index], part).grad = self._gradient_of(
                    reducer, slot, part
                )

    def _gradient_of(self, reducer: Reducer, slot: Slot, part: Part) -> torch.Tensor | None:
        bucket = slot.bucket
        if isinstance(bucket, CutBucket):
            if not slot.has_result():
                return None
            offset = bucket.offsets_elems[slot.position]
            return bucket.flat[offset + part.begin : offset + part.end]
        grad = slot.param.grad
        if grad is None:
            return None
        return laid_out_as(grad, slot.param)[part.begin : part.end]
