"""The rounds of one optimizer: starts the reductions of a round, waits for them, sets `.grad`.

A round is one reduction of all gradients. It is open from its first gradient, or from `step`, until
its results are there.

A signal's handler may raise between any two lines. Then the other ranks wait for the rest of the
round, and the next call that needs the round ends it here: each part of a round's end can be
repeated, and one statement closes the round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from hvdlite.errors import HorovodInternalError
from hvdlite.observe import waits
from hvdlite.optimizer.backward_pass import BackwardPass
from hvdlite.optimizer.buckets.bucket import Bucket
from hvdlite.optimizer.buckets.gpu_bucket import GpuBucket
from hvdlite.optimizer.buckets.positions import Position
from hvdlite.optimizer.buckets.slot import Form, Slot
from hvdlite.optimizer.buckets.tree_bucket import TreeBucket
from hvdlite.optimizer.checks.numerics import Numerics
from hvdlite.optimizer.checks.position_exchange import PositionExchange, difference, with_advice
from hvdlite.optimizer.gradients import Gradients
from hvdlite.optimizer.micro_batches import MicroBatches
from hvdlite.optimizer.overlap import on_the_way
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
from hvdlite.world.teams.team import Team
from hvdlite.world.telling import last_line


class Rounds:
    """Runs one round at a time. Hooks bring the gradients: see `Reducer`."""

    def __init__(self, gradients: Gradients) -> None:
        self.gradients = gradients
        self.weights = Weights()
        self.micro_batches = MicroBatches(gradients)
        # Since the last round: the backward passes that count for passes_per_step, that is, those
        # outside no_sync(); and whether there was any backward pass.
        self._passes = 0
        self._has_unreduced = False
        # The backward pass that has begun and has not reached its end; it may have raised.
        self._backward: BackwardPass | None = None
        # What the hooks know of it: its number, that of the step's first one, whether one is open
        # (has begun and is not finished), and whether a backward pass runs.
        self.round = gradients.round
        # What follows belongs to the open round.
        # The bucket to start next.
        self._next = 0
        # `step` or `synchronize` runs it, not the end of a backward pass.
        self._by_step = True
        # Its backward has raised, and `.grad` is not set to the gradients in flight.
        self._grads_withdrawn = False
        # Slots whose `.grad` has an autograd graph, and gets its values at the end of the round.
        self._with_graph: list[Slot] = []
        # The exchanges of the sparse gradients, once the dense ones are reduced.
        self._exchanges: list[tuple[Slot, RowExchange]] | None = None
        # Compares the ranks' positions, once they are found to differ.
        self._position_exchange: PositionExchange | None = None
        # The optimizers of which some rank has begun a round in the same backward, by their numbers
        # in the team; None: the positions are not known to differ.
        self._begun_anywhere: set[int] | None = None
        # This rank's position; and the team and era in which it is counted.
        self._position = Position()
        self._counts_since: tuple[Team | None, int] = (None, 0)
        # Looks for NaN and infinite gradients in the round, if asked for; and what rounds since the
        # last step have found, in words.
        self._numerics: Numerics | None = None
        self._not_finite: str | None = None
        self._communicated = False

    def _open_round(self) -> None:
        """A round begins; other ranks don't know of it yet. Blocks if parameters are on the way."""
        gradients = self.gradients
        # They come in the memory of the buckets.
        on_the_way.wait_for(gradients.params())
        for bucket in gradients.buckets:
            bucket.reset()
        if gradients.record is not None:
            gradients.record.reset()
        team = gradients.team
        if self._counts_since != (since := (team, team.era if team else 0)):
            self._position.restart()
            self._counts_since = since
        self._position.weight = self.weights.of_round(gradients.slots)
        self._position.weight_in_input = self.weights.add_up
        self._position.has_raised = False
        self._next, self._by_step, self._grads_withdrawn = 0, True, False
        self._with_graph, self._exchanges, self._position_exchange = [], None, None
        self._begun_anywhere = None
        self._numerics = None
        if team is not None and gradients.are_current() and world.current().config.check_numerics:
            named = [(slot.name, slot.param) for slot in gradients.slots]
            self._numerics = Numerics(team, gradients.name, named)
        self.round.is_open = True

    def _has_started(self) -> bool:
        """Whether other ranks may wait for the rest of the open round."""
        gradients = self.gradients
        first = gradients.buckets[0].runs if gradients.buckets else self._exchanges
        backward_order = gradients.backward_order
        begun = bool(first) or (backward_order is not None and backward_order.posted())
        begun = begun or (self._numerics is not None and self._numerics.posted())
        return begun and gradients.are_current()

    def _copy_into_bucket(self, slot: Slot, grad: torch.Tensor | None) -> None:
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
            # If this backward was interrupted, the sum may be in its place already.
            if grad is not place or not bucket.has_parts(slot):
                bucket.put(slot, grad)
        elif grad is place:
            if factor is not None:
                self.weights.weigh_in_place(slot, place, factor)
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
        # In one statement: no signal's exception can come in between.
        slot.weighed, slot.param.grad, slot.round_grad = weighed, place, place

    def _is_reduced(self, slot: Slot, grad: torch.Tensor | None) -> bool:
        """Whether this gradient is the result of a round of this step."""
        return self.has_result(slot) and (grad is slot.round_grad or slot.is_sharded)

    def has_result(self, slot: Slot) -> bool:
        """Whether a round of this step has reduced its gradient."""
        return slot.last_round >= self.round.first_of_step

    def _start_complete(self) -> None:
        # In the first round of these buckets some ranks may not know yet that all are alike: then
        # none starts before its backward has ended, or ranks whose backward raises would disagree
        # on whether the round has begun.
        if not (self.gradients.had_a_round and self.gradients.known_alike()):
            return
        buckets = self.gradients.buckets
        while self._next < len(buckets) and not buckets[self._next].pending:
            self._start(buckets[self._next])
            self._next += 1

    def _start(self, bucket: Bucket) -> None:
        # (Gradients of weight 0 count as zeros, whatever they are.)
        if self._numerics is not None and not bucket.runs and self._position.weight != 0:
            bucket.gather()
            self._numerics.look_into(bucket)
        bucket.start(self._position)
        if self.gradients.record is not None and bucket is self.gradients.buckets[-1]:
            self.gradients.record.end(self._position)

    def _start_rest(self) -> None:
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
            for slot in self.gradients.slots if self._position.weight != 0 else ():
                grad = slot.param.grad
                if grad is None or not grad.is_sparse:
                    continue
                if slot.last_round == self.round.number or self._counts_in_round(slot, grad):
                    self._numerics.look_at(slot.param, grad)
            self._numerics.post()

    def _fill_absent(self, bucket: Bucket) -> None:
        """Fills the places for which this backward pass brought no gradient."""
        for position, slot in enumerate(bucket.slots):
            if slot.last_round == self.round.number:
                continue
            grad = slot.param.grad
            has_parts = isinstance(bucket, TreeBucket) and bucket.has_parts(slot)
            if has_parts or (grad is not None and self._counts_here(slot, grad)):
                self._copy_into_bucket(slot, grad)
                slot.last_round = self.round.number
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

    def _counts_in_round(self, slot: Slot, grad: torch.Tensor) -> bool:
        """Whether a gradient that this backward pass has not brought counts in this round: one
        accumulated by earlier passes or, in a round that `step` runs, one that the user has set."""
        return (
            slot.unreduced_round == self.round.number
            or (self._by_step and slot.param.requires_grad)
        ) and not self._is_reduced(slot, grad)

    def _counts_here(self, slot: Slot, grad: torch.Tensor) -> bool:
        """`_counts_in_round`, with what virtual ranks ask of a gradient that is in a bucket. In a
        round that is given up, none counts: its place would be overwritten."""
        if self._position.has_raised or not self._counts_in_round(slot, grad):
            return False
        if self._backward is None:
            self.micro_batches.require_of_backward(slot, grad)
        return self._backward is not None or not isinstance(slot.bucket, TreeBucket)

    def _cancel_if_it_fails(self, part: Callable[[], None]) -> None:
        """Runs a part of the round's end. If it fails on all ranks, the round is over. After any
        other error, such as one that a signal's handler raises, the next call repeats it."""
        try:
            part()
        except BaseException as error:
            if isinstance(error, HorovodInternalError) or not self.gradients.are_current():
                self._cancel_round()
            raise

    def _collect(self) -> None:
        """Waits for everything, and gives all gradients their reduced values."""
        last_line.look()
        if waits.observed():
            with waits.waiting(f"hvdlite::{self.gradients.name} waits for its gradients"):
                self._collect_unobserved()
        else:
            self._collect_unobserved()

    def _collect_unobserved(self) -> None:
        gradients = self.gradients
        self._wait()
        self.weights.require_range(gradients)
        self.weights.divide(gradients)
        if gradients.shards is not None:
            gradients.shards.require_all_members(gradients)
        if self._grads_withdrawn:
            self._restore_grads()
        for bucket in gradients.buckets:
            if bucket.absent or bucket.unknown or bucket.in_rows:
                self._read_presences(bucket)
        if gradients.sparse or self._exchanges:
            self._exchange_rows()
        for slot in self._with_graph:
            assert slot.round_grad is not None
            assert slot.view is not None
            slot.round_grad.data.copy_(slot.view)

    def _close_round(self) -> None:
        """The round has its result: closes it."""
        position, weights = self._position, self.weights
        backward_order = self.gradients.backward_order
        # In one statement, so that an exception finds the round either open or closed.
        (
            self.round.is_open,
            self.round.in_backward,
            self.round.number,
            position.rounds,
            self._communicated,
            self._passes,
            self._has_unreduced,
            self._backward,
            weights.last,
            weights.total,
        ) = (
            False,
            False,
            self.round.number + 1,
            position.rounds + 1,
            True,
            0,
            False,
            None,
            weights.total,
            None,
        )
        self.gradients.had_a_round = True
        self.micro_batches.forget()
        if backward_order is not None:
            self.gradients.learn_order(self.round.number)
        if self.gradients.shards is not None:
            self.gradients.shards.take_gradients(self.gradients, self.has_result)

    def learn_if_due(self) -> None:
        """What an interruption has kept the last round from learning. Collective then."""
        order = self.gradients.backward_order
        if not self.round.is_open and order is not None and order.posted():
            self.gradients.learn_order(self.round.number)
        if self.gradients.shards is not None:
            self.gradients.shards.take_gradients(self.gradients, self.has_result)

    def _cancel_round(self) -> None:
        """Ends a round without a result; none of it is in flight. Gradients that have come count in
        the next round."""
        if self.gradients.backward_order is not None:
            self.gradients.backward_order.forget()
        for slot in self.gradients.slots:
            if slot.last_round == self.round.number:
                slot.last_round, slot.unreduced_round = -1, self.round.number
            if slot.unreduced_round == self.round.number:
                slot.unreduced_round += 1
        self.micro_batches.spoil()
        self.round.is_open, self.round.in_backward = False, False
        self.round.number, self._backward = self.round.number + 1, None

    def _wait(self) -> None:
        """Blocks until all that was started has ended.

        Raises:
            HorovodInternalError: A reduction failed, or the ranks are at different positions.
        """
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
                positions, ranks, self._begun_anywhere = found
                self._require_one(positions, ranks)
        failure = next((text for text in failures if text is not None), None)
        if failure is not None:
            raise HorovodInternalError(with_advice(failure))
        if self._numerics is not None and self._not_finite is None:
            self._not_finite = self._numerics.report(self._position.phase // 2 + 1)

    def _exchange_positions(self) -> PositionExchange | None:
        """Once the gradients are reduced: posts the exchange of the positions if they differ, or if
        all ranks give the round up. The same on all ranks."""
        gradients = self.gradients
        carrier = gradients.carrier
        if carrier is None or not carrier.positions_differ(or_are=self._position.has_raised):
            return None
        assert gradients.team is not None
        if self._position_exchange is None:
            self._position_exchange = PositionExchange(
                gradients.team, gradients.name, self._position, self._begun_here()
            )
        self._position_exchange.post()
        return self._position_exchange

    def _begun_here(self) -> list[int]:
        """The optimizers of the team whose rounds this rank has begun in the same backward, by
        their numbers in it."""
        return [self.gradients.number]

    def _require_one(self, positions: Sequence[tuple[int, ...]], ranks: Sequence[int]) -> None:
        """Raises HorovodInternalError if the positions differ; from then on all ranks count from
        the phase of the rank that is furthest."""
        team = self.gradients.team
        text = difference(positions, ranks, team.era if team else 0)
        if text is not None:
            self._position.restart(max(phase for phase, *_ in positions))
            raise HorovodInternalError(text)

    def _read_presences(self, bucket: Bucket) -> None:
        """Learns from the summed presences which ranks have which gradient, and in which form."""
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
                slot.param.grad = slot.round_grad = slot.view.clone() if is_dense else rows_in(slot)
                slot.last_round = self.round.number
        for position in bucket.absent:
            slot = bucket.slots[position]
            if totals[position] and slot.form is not Form.SPARSE and slot.rows is None:
                slot.param.grad = slot.round_grad = slot.view
                slot.last_round = self.round.number

    def _exchange_rows(self) -> None:
        """Reduces the sparse gradients, including those that this round has shown to be sparse."""
        gradients = self.gradients
        assert gradients.team is not None
        if self._exchanges is None:
            self._exchanges = [
                self._exchange(gradients.name_of_sparse(number, slot), slot)
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
                slot.param.grad = slot.round_grad = grad
                slot.last_round = self.round.number
            if slot.form is Form.SPARSE and gradients.sparse_as_dense:
                gradients.stale = True
                slot.form = Form.ROWS
            elif (slot.form is Form.SPARSE) == (slot.bucket is not None):
                gradients.stale = True
        gradients.sparse = [slot for slot in gradients.sparse if slot.form is Form.SPARSE]

    def _exchange(self, label: str, slot: Slot) -> tuple[Slot, RowExchange]:
        gradients = self.gradients
        assert gradients.team is not None
        what, grad = self._contribution(slot)
        exchange = RowExchange(
            label,
            slot.param,
            what,
            self.weights.of_rows(slot, grad),
            gradients.combining,
            gradients.team,
            self._position,
        )
        return slot, exchange

    def _contribution(self, slot: Slot) -> tuple[Contribution, torch.Tensor | None]:
        """This rank's contribution to a gradient whose rows are gathered."""
        grad = slot.param.grad
        if slot.bucket is not None:
            if slot.last_round != self.round.number:
                return Contribution.NOTHING, None
            if slot.position not in slot.bucket.misplaced:
                return Contribution.REDUCED, None
        elif slot.last_round != self.round.number and (
            grad is None or not self._counts_in_round(slot, grad)
        ):
            return Contribution.NOTHING, None
        return contribution_of(grad), grad

    def _withdraw_grads(self, _: object) -> None:
        """The backward pass, or `step`, has raised. Unsets `.grad` of gradients in flight, to which
        the next backward pass could otherwise add."""
        self.round.in_backward = False
        if not self.round.is_open or not self._has_started():
            return
        self._grads_withdrawn = True
        for bucket in self.gradients.buckets:
            for slot in bucket.slots if bucket.runs else ():
                if slot.param.grad is slot.view:
                    slot.param.grad = None

    def _restore_grads(self) -> None:
        """Undoes `_withdraw_grads`."""
        for slot in self.gradients.slots:
            if slot.last_round == self.round.number and slot.round_grad is slot.view is not None:
                slot.param.grad = slot.round_grad
        for slot in self._with_graph:
            slot.param.grad = slot.round_grad
