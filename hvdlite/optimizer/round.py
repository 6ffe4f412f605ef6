"""One round: a reduction of all gradients, from its beginning to its result.

A round begins with the first gradient of a backward pass that communicates, or in `step`. Other
ranks know of it when its first bucket starts. If the backward pass or `step` raises then, they wait
for the rest of the round. The rank gives it up: it runs the round to its end, and no rank uses the
result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from hvdlite.errors import HorovodInternalError
from hvdlite.observe import waits
from hvdlite.optimizer.buckets.bucket import Bucket
from hvdlite.optimizer.buckets.gpu_bucket import GpuBucket
from hvdlite.optimizer.buckets.positions import Position
from hvdlite.optimizer.buckets.slot import Form, Slot
from hvdlite.optimizer.buckets.tree_bucket import TreeBucket
from hvdlite.optimizer.checks.numerics import Numerics
from hvdlite.optimizer.checks.position_exchange import PositionExchange, difference, with_advice
from hvdlite.optimizer.gradients import Gradients
from hvdlite.optimizer.micro_batches import MicroBatches
from hvdlite.optimizer.overlap import in_flight
from hvdlite.optimizer.sharding.words import mixed_forms
from hvdlite.optimizer.sparse_gradients import (
    Contribution,
    RowExchange,
    contribution_of,
    put_rows,
    rows_in,
)
from hvdlite.optimizer.weights import Weights, put
from hvdlite.world import world
from hvdlite.world.telling import last_line


class Round:
    """The open round of one optimizer."""

    def __init__(
        self,
        gradients: Gradients,
        weights: Weights,
        micro_batches: MicroBatches,
        position: Position,
        *,
        of_backward: bool,
        begun_here: Callable[[], list[int]],
    ) -> None:
        """Begins one; other ranks don't know of it yet. Blocks if parameters are in flight.

        of_backward: a backward pass runs it. begun_here: gives the numbers of the team's optimizers
            of which this rank has begun a round in the same backward.
        """
        # They come in the memory of the buckets.
        in_flight.wait_for(gradients.params())
        for bucket in gradients.buckets:
            bucket.reset()
        if gradients.record is not None:
            gradients.record.reset()
        self.gradients = gradients
        self.weights = weights
        self.micro_batches = micro_batches
        self.position = position
        self.of_backward = of_backward
        self._begun_here = begun_here
        # The bucket to start next.
        self._next = 0
        # `step` or `synchronize` ends it, not the end of a backward pass.
        self.by_step = True
        # Slots whose `.grad` has an autograd graph, and gets its values at the end.
        self._with_graph: list[Slot] = []
        # The exchanges of the sparse gradients, once the dense ones are reduced.
        self._exchanges: list[tuple[Slot, RowExchange]] | None = None
        # Compares the ranks' positions, once they are found to differ.
        self._position_exchange: PositionExchange | None = None
        # The optimizers of which some rank has begun a round in the same backward, by their numbers
        # in the team; None: the positions are not known to differ.
        self.begun_anywhere: set[int] | None = None
        # Some rank has given it up: no rank uses the result.
        self.was_given_up = False
        # NaN and infinite gradients, in words, if they are looked for and some rank has them.
        self.not_finite: str | None = None
        position.weight = weights.of_round(gradients.slots)
        position.weight_in_input = weights.add_up
        position.error = ""
        team, self._numerics = gradients.team, None
        if team is not None and gradients.are_current() and world.current().config.check_numerics:
            named = [(slot.name, slot.param) for slot in gradients.slots]
            self._numerics = Numerics(team, gradients.name, named)

    def has_started(self) -> bool:
        """Whether other ranks may wait for the rest of it."""
        gradients = self.gradients
        first = gradients.buckets[0].runs if gradients.buckets else self._exchanges
        backward_order = gradients.backward_order
        begun = bool(first) or (backward_order is not None and backward_order.posted())
        begun = begun or (self._numerics is not None and self._numerics.posted())
        return begun and gradients.are_current()

    # Gradients come, and buckets start.

    def copy_to_bucket(self, slot: Slot, grad: torch.Tensor | None) -> None:
        """Copies a gradient to its place in the bucket, which becomes `.grad`. None: only earlier
        micro-batches have one."""
        if grad is not slot.view and slot.is_kept():
            slot.give_away_copy()
        bucket, place = slot.bucket, slot.view
        assert bucket is not None
        assert place is not None
        if isinstance(bucket, GpuBucket):
            bucket.note_stream()
        factor, weighed = self.weights.on_copy(slot)
        if isinstance(bucket, TreeBucket):
            bucket.put(slot, grad)
        elif grad is place:
            if factor is not None:
                put(place, place, factor)
        elif grad is not None:
            if slot.form is Form.ROWS:
                # `.grad` will be the reduced rows, when they are known.
                if not put_rows(slot, grad):
                    bucket.misplaced.append(slot.position)
                if factor is not None:
                    put(place, place, factor)
                if factor == 0:
                    assert slot.rows is not None
                    slot.rows.zero_()
                return
            if grad.is_sparse:
                if slot.form is Form.UNKNOWN:
                    # Its rows will be gathered.
                    place.zero_()
                    bucket.misplaced.append(slot.position)
                    return
                grad = grad.to_dense()
            if isinstance(bucket, GpuBucket) and factor is None and not grad.requires_grad:
                slot.weighed = weighed
                bucket.defer(slot, grad)
                return
            if grad.requires_grad:
                # Of create_graph: the graph refers to this tensor, which stays `.grad`.
                put(place, grad.detach(), factor)
                slot.round_grad = grad
                self._with_graph.append(slot)
                return
            put(place, grad, factor)
        slot.weighed, slot.param.grad, slot.round_grad = weighed, place, place

    def start_complete(self) -> None:
        """Starts the buckets that are complete, up to the first one that is not."""
        # In the first round of these buckets some ranks may not know yet that all are alike: then
        # none starts before its backward has ended, or ranks whose backward raises would disagree
        # on whether the round has begun.
        if not (self.gradients.had_a_round and self.gradients.known_alike()):
            return
        buckets = self.gradients.buckets
        while self._next < len(buckets) and not buckets[self._next].pending:
            self._start(buckets[self._next])
            self._next += 1

    def start_rest(self) -> None:
        """Starts the buckets that have not started; waits only for the ranks' consistency check."""
        self.gradients.require_alike()
        for bucket in self.gradients.buckets[self._next :]:
            if bucket.pending and not bucket.runs:
                self._fill_absent(bucket)
            self._start(bucket)
            self._next += 1
        if self.gradients.backward_order is not None:
            self.gradients.backward_order.post()
        if self._numerics is not None:
            for slot in self.gradients.slots if self.position.weight != 0 else ():
                grad = slot.param.grad
                if grad is None or not grad.is_sparse:
                    continue
                if slot.has_come() or self._counts(slot, grad):
                    self._numerics.look_at(slot.param, grad)
            self._numerics.post()

    def _start(self, bucket: Bucket) -> None:
        # (Gradients of weight 0 count as zeros, whatever they are.)
        if self._numerics is not None and not bucket.runs and self.position.weight != 0:
            bucket.gather()
            self._numerics.look_into(bucket)
        bucket.start(self.position)
        if self.gradients.record is not None and bucket is self.gradients.buckets[-1]:
            self.gradients.record.end(self.position)

    def _fill_absent(self, bucket: Bucket) -> None:
        """Fills the places for which this backward pass brought no gradient."""
        for position, slot in enumerate(bucket.slots):
            if slot.has_come():
                continue
            grad = slot.param.grad
            has_parts = isinstance(bucket, TreeBucket) and bucket.has_parts(slot)
            if has_parts or (grad is not None and self._counts_in(bucket, slot, grad)):
                self.copy_to_bucket(slot, grad)
                slot.note_arrival()
                continue
            assert slot.view is not None
            # Its values must survive the round if it is `.grad`, or if the user keeps it.
            if grad is slot.view:
                slot.round_grad = None if slot.round_grad is grad else slot.round_grad
                slot.give_away_copy()
            elif slot.is_kept():
                slot.give_away_copy()
            slot.view.zero_()
            if (contribution := bucket.contribution(slot)) is not slot.view:
                contribution.zero_()
            if slot.rows is not None:
                slot.rows.zero_()
            bucket.absent.append(position)

    def _counts(self, slot: Slot, grad: torch.Tensor) -> bool:
        """Whether a gradient that this backward pass has not brought counts in the round: one
        accumulated by earlier passes or, in a round that `step` runs, one that the user has set."""
        may_count = slot.is_left_over() or (self.by_step and slot.param.requires_grad)
        return may_count and not slot.is_reduced(grad)

    def _counts_in(self, bucket: Bucket, slot: Slot, grad: torch.Tensor) -> bool:
        """`_counts`, with what virtual ranks ask of a gradient that is in a bucket. In a round that
        is given up, none counts: its place would be overwritten."""
        if self.position.error or not self._counts(slot, grad):
            return False
        if not self.of_backward:
            self.micro_batches.require_of_backward(slot, grad)
        return self.of_backward or not isinstance(bucket, TreeBucket)

    # The result.

    def collect(self) -> None:
        """Waits for everything, and gives all gradients their reduced values.

        Raises:
            HorovodInternalError: A reduction failed, or the ranks are at different positions.
        """
        last_line.look()
        if waits.observed():
            with waits.waiting(f"hvdlite::{self.gradients.name} waits for its gradients"):
                self._collect()
        else:
            self._collect()

    def _collect(self) -> None:
        gradients = self.gradients
        self._wait()
        self.weights.require_range(gradients)
        self.weights.divide(gradients)
        if gradients.shards is not None:
            gradients.shards.require_all_members(gradients)
        for bucket in gradients.buckets:
            if bucket.absent or bucket.unknown or bucket.in_rows:
                self._read_masks(bucket)
        if gradients.sparse or self._exchanges:
            self._exchange_rows()
        for slot in self._with_graph:
            assert slot.round_grad is not None
            assert slot.view is not None
            slot.round_grad.data.copy_(slot.view)

    def _wait(self) -> None:
        gradients = self.gradients
        # (First what needs no device: it says whether what was launched will end.)
        failures = [gradients.record.wait()] if gradients.record is not None else []
        failures += [bucket.wait() for bucket in gradients.buckets]
        if gradients.backward_order is not None:
            failures.append(gradients.backward_order.wait())
        if self._numerics is not None:
            failures.append(self._numerics.wait())
        if (exchange := self._exchange_positions()) is not None:
            found = exchange.exchange()
            if found is not None:
                positions, ranks, self.begun_anywhere = found
                self._require_one(positions, ranks)
        failure = next((text for text in failures if text is not None), None)
        if failure is not None:
            raise HorovodInternalError(with_advice(failure))
        if self._numerics is not None and self.not_finite is None:
            self.not_finite = self._numerics.report(self.position.phase // 2 + 1)

    def _exchange_positions(self) -> PositionExchange | None:
        """Once the gradients are reduced: posts the exchange of the positions if they differ, or if
        all ranks give the round up. The same on all ranks."""
        gradients = self.gradients
        carrier = gradients.carrier
        if carrier is None or not carrier.positions_differ(or_are=bool(self.position.error)):
            return None
        assert gradients.team is not None
        if self._position_exchange is None:
            self._position_exchange = PositionExchange(
                gradients.team, gradients.name, self.position, self._begun_here()
            )
        self._position_exchange.post()
        return self._position_exchange

    def _require_one(self, positions: Sequence[tuple[int, ...]], ranks: Sequence[int]) -> None:
        """Raises HorovodInternalError if the positions differ; from then on all ranks count from
        the phase of the rank that is furthest."""
        team = self.gradients.team
        is_same = len({tuple(each[:2]) for each in positions}) == 1
        self.was_given_up = is_same and any(error for *_, error in positions)
        text = difference(positions, ranks, team.era if team else 0)
        if text is not None:
            self.position.restart(max(phase for phase, *_ in positions))
            raise HorovodInternalError(text)

    def _read_masks(self, bucket: Bucket) -> None:
        """Learns from the summed masks which ranks have which gradient, and in which form."""
        gradients = self.gradients
        assert gradients.team is not None
        totals = bucket.totals()
        # Only what all ranks can learn counts: a joined rank learns nothing.
        learns = gradients.combining.counts_all_ranks(totals[-1], gradients.team.size)
        for slot in bucket.unknown:
            total = totals[slot.position]
            if math.isinf(total):
                slot.form = Form.SPARSE
            elif total and learns:
                slot.form = Form.DENSE
        if bucket.unknown:
            gradients.sparse = [slot for slot in gradients.slots if slot.form is Form.SPARSE]
        bucket.unknown = [slot for slot in bucket.unknown if slot.form is Form.UNKNOWN]
        for slot in bucket.in_rows:
            total = totals[slot.position]
            is_dense = math.isinf(total)
            if is_dense and learns:
                slot.form = Form.DENSE
                gradients.stale = True
            if total:
                assert slot.view is not None
                slot.take_result(slot.view.clone() if is_dense else rows_in(slot))
        for position in bucket.absent:
            slot = bucket.slots[position]
            if totals[position] and slot.form is not Form.SPARSE and slot.rows is None:
                slot.take_result(slot.view)

    def _exchange_rows(self) -> None:
        """Reduces the sparse gradients, including those that this round has shown to be sparse."""
        gradients = self.gradients
        assert gradients.team is not None
        if self._exchanges is None:
            self._exchanges = [
                (slot, self._exchange(gradients.name_of_sparse(number, slot), slot))
                for number, slot in enumerate(gradients.sparse)
            ]
        for _, exchange in self._exchanges:
            exchange.post()
        finished = [(slot, *exchange.finish()) for slot, exchange in self._exchanges]
        self._require_one(self._exchanges[0][1].positions(), gradients.team.ranks)
        for slot, grad, contributions in finished:
            if grad is not None:
                if not contributions <= {Contribution.NOTHING, Contribution.ROWS}:
                    # The sum of a sparse and a dense gradient is dense, as in one process.
                    slot.form = Form.DENSE
                    grad = grad.to_dense()
                if Contribution.REDUCED in contributions:
                    assert slot.view is not None
                    if slot.in_parts:
                        raise HorovodInternalError(mixed_forms(slot))
                    grad += slot.view
                slot.take_result(grad)
            if slot.form is Form.SPARSE and gradients.sparse_as_dense:
                gradients.stale = True
                slot.form = Form.ROWS
            elif (slot.form is Form.SPARSE) == (slot.bucket is not None):
                gradients.stale = True
        gradients.sparse = [slot for slot in gradients.sparse if slot.form is Form.SPARSE]

    def _exchange(self, label: str, slot: Slot) -> RowExchange:
        gradients = self.gradients
        assert gradients.team is not None
        what, grad = self._contribution(slot)
        return RowExchange(
            label,
            slot.param,
            what,
            self.weights.of_rows(slot, grad),
            gradients.combining,
            gradients.team,
            self.position,
        )

    def _contribution(self, slot: Slot) -> tuple[Contribution, torch.Tensor | None]:
        """This rank's contribution to a gradient whose rows are gathered."""
        grad = slot.param.grad
        if slot.bucket is not None:
            if not slot.has_come():
                return Contribution.NOTHING, None
            if slot.position not in slot.bucket.misplaced:
                return Contribution.REDUCED, None
        elif not slot.has_come() and (grad is None or not self._counts(slot, grad)):
            return Contribution.NOTHING, None
        return contribution_of(grad), grad

    # A backward pass, or `step`, has raised.

    def withdraw_grads(self) -> None:
        """Unsets `.grad` of gradients in flight, to which the next backward pass could add."""
        if not self.has_started():
            return
        for bucket in self.gradients.buckets:
            for slot in bucket.slots if bucket.runs else ():
                if slot.param.grad is slot.view:
                    slot.param.grad = None

    def give_up(self, error: str) -> None:
        """Tells the other ranks that no step will be made with it, unless all gradients are there
        and the position is on its way: then they make the step. error: what has raised."""
        carrier = self.gradients.carrier
        if carrier is None or not carrier.has_position():
            self.position.error = error

    def is_given_up(self) -> bool:
        """Whether all ranks have told that their positions differ, or that they give it up. Does
        not block."""
        carrier = self.gradients.carrier
        if carrier is None or not carrier.ends_within(0):
            return False
        carrier.wait()
        exchange = self._exchange_positions()
        return exchange is not None and exchange.has_ended()

    def ends_within(self, limit_s: float) -> bool:
        """Whether it can be collected by then."""
        carrier = self.gradients.carrier
        return carrier is None or carrier.ends_within(limit_s)
