"""Reduces gradients while backward still runs: gradient hooks → buckets → the engine's plans.

A **round** is one reduction of all gradients. Every rank runs the same rounds in the same order,
and within a round starts the buckets in the order of their index; so nothing is negotiated.

- A hook runs as soon as autograd has accumulated a parameter's gradient. It copies the gradient to
  its place in its bucket, and that place becomes `.grad`: the reduced values need no copy out.
- A bucket starts when it and all before it are complete.
- When backward ends, a callback of autograd fills the places of missing gradients with zeros,
  starts what has not started, and waits: `backward()` returns with reduced gradients.
- A rank whose backward came to no parameter at all runs its round in `step`.

With the gradients of a bucket travels one number for each: 1 where the rank has it, else 0. Where
the sum is 0 no rank has that gradient, and `.grad` stays as it was.

Sparse gradients have no place once all ranks know of them: they learn it by the same number, which
is infinite then. Their rows are gathered at the end of the round.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from hvdlite.arena import Bucket, Combining, Form, Slot
from hvdlite.backwards import Backward, current_task
from hvdlite.errors import HorovodInternalError
from hvdlite.gradients import Gradients
from hvdlite.losses import loss_of_all
from hvdlite.optimizer_arguments import Names
from hvdlite.process_sets import ProcessSet
from hvdlite.sparse_gradients import Held, RowExchange, held, put_rows, rows_in

_alive: weakref.WeakSet[Reducer] = weakref.WeakSet()
_ages = itertools.count()


class Reducer:
    """The gradients of one optimizer. Its hooks live until `detach`."""

    def __init__(
        self,
        groups: Callable[[], Sequence[dict[str, Any]]],
        names: Names,
        combining: Combining,
        *,
        passes: int,
        first_form: Form,
        sparse_as_dense: bool,
        optimizer: str,
        process_set: ProcessSet,
        check_start: bool,
    ) -> None:
        """For the arguments see `Gradients`."""
        self.passes_per_step = passes
        # Off inside no_sync().
        self.communicates = True
        # Since the last round: the backwards that count for passes_per_step, which those in
        # no_sync() do not; and whether there was any.
        self._passes = 0
        self._has_unreduced = False
        self._lock = threading.Lock()
        # The graph task of autograd whose gradients come.
        self._task = -1
        # The backward that has begun and did not come to its end; it may have raised.
        self._backward: Backward | None = None
        self._round = 0
        # Rounds from this one on belong to the present step.
        self._first_round = 0
        # A round has begun and is not finished; and the bucket to start next, 0 where none is open.
        self._open = False
        self._next = 0
        self._communicated = False
        # Whose `.grad` has a graph of its own, and gets its values at the end of the round.
        self._with_graph: list[Slot] = []
        # GradScaler was told to make a step, and has not made it yet: it may have left it out.
        self.step_is_due = False
        # Greater than of those that were made before it.
        self._age = next(_ages)
        self._gradients = Gradients(
            groups,
            names,
            combining,
            first_form,
            sparse_as_dense,
            optimizer,
            process_set,
            check_start,
            self._on_gradient,
        )
        _alive.add(self)

    # What the optimizer asks for.

    def in_flight(self) -> bool:
        """Whether a backward is reducing gradients; also where it has raised, and other ranks wait
        for the rest."""
        runs = self._backward is not None and self._backward.runs()
        return self._next > 0 or (self._open and runs)

    def finish(self) -> None:
        """Sees to it that all gradients of this step are reduced. Blocks.

        Raises:
            HorovodInternalError: The reduction failed.
        """
        self._forget_skipped_step()
        if self._open or not self._communicated or self._has_unreduced:
            if not self._open:
                self._gradients.rebuild_if_changed(self._round)
            self._finish_round(by_step=True)

    def loss_of_all(self, loss: Any) -> Any:
        """After `finish`: the ranks' losses as one. Blocks."""
        gradients = self._gradients
        if gradients.team is None or gradients.team.size == 1:
            return loss
        name, op = f"{gradients.name}.loss", gradients.combining.op
        return loss_of_all(loss, name, op, gradients.process_set)

    def next_step(self) -> None:
        """The gradients are used up or gone: the next backward belongs to another step."""
        if self._open and not self._next:
            self._cancel_round()
        self._round += 1
        self._first_round = self._round
        self._communicated = False
        self._passes = 0
        self._has_unreduced = False
        self._backward = None
        self._task = -1
        self.step_is_due = False

    def short_of_passes(self) -> tuple[int, int] | None:
        """The backwards that count in this step, and how many there should be, where `finish` would
        cut an accumulation short."""
        if not 0 < self._passes < self.passes_per_step or self.step_is_due:
            return None
        return self._passes, self.passes_per_step

    def has_communicated(self) -> bool:
        """Whether this step's gradients, or some of them, are reduced."""
        return self._communicated

    def expect_step(self) -> None:
        """GradScaler is told to make a step, which it may leave out."""
        self._forget_skipped_step()
        self.step_is_due = True

    def _forget_skipped_step(self) -> None:
        if self.step_is_due:
            self.next_step()

    def set_passes_per_step(self, passes: int) -> None:
        self.passes_per_step = passes
        self._passes = 0

    def detach(self) -> None:
        """Removes the hooks; from now on it does nothing."""
        self._gradients.detach()
        _alive.discard(self)

    def release(self, params: Mapping[int, torch.Tensor]) -> None:
        """Reduces no gradient of these parameters, given by their ids, any more."""
        if not self._gradients.release(params):
            self.detach()

    def note_parameters(self) -> None:
        """The optimizer may have others now, and the next backward may come to these alone."""
        if not self._open:
            self._gradients.rebuild_if_changed(self._round)

    # Hooks.

    def _on_gradient(self, slot: Slot, param: torch.Tensor) -> None:
        """Autograd has accumulated this parameter's gradient. In a thread of autograd."""
        with self._lock:
            task = current_task()
            if task != self._task:
                self._begin_backward(task)
            grad = param.grad
            if grad is None:
                return  # a hook of the user's has taken it
            if slot.mark == self._round or self._is_reduced(slot, grad):
                error = self._reached_again(slot)
                if self._open and not self._next:
                    self._cancel_round()
                raise error
            if not self._open:
                slot.dirty = self._round
                return
            slot.mark = self._round
            arrivals = self._gradients.arrivals
            if arrivals is not None:
                arrivals.note(slot)
            bucket = slot.bucket
            if bucket is None:
                return
            self._take(slot, grad)
            bucket.pending -= 1
            if not bucket.pending:
                self._start_complete()

    def _begin_backward(self, task: int) -> None:
        """The first gradient of a backward, or of one inside it (reentrant checkpoints)."""
        if self._backward is not None and self._backward.runs():
            self._task = task
            return
        self._forget_skipped_step()
        if self._open:
            if self._next:
                raise RuntimeError(
                    "the last backward() raised when the other ranks were reducing its gradients "
                    "already, and they wait for the rest; call the optimizer's synchronize(), then "
                    "its zero_grad(), before the next backward()"
                )
            self._cancel_round()
        self._gradients.rebuild_if_changed(self._round)
        self._task = task
        self._backward = Backward(self._end_backward)
        # One that raises does not count as a pass, but may leave gradients.
        self._has_unreduced = True
        self._open = self.communicates and self._passes + 1 >= self.passes_per_step

    def _end_backward(self) -> None:
        """All gradients of the backward are there."""
        ended, self._backward = self._backward, None
        if ended is None:
            return  # the end of another optimizer has seen to this one
        if self.communicates:
            self._passes += 1
        if not self._open:
            return
        # Those of all optimizers that it has reached, in an order that all ranks have, first what
        # does not wait: autograd may come to their ends in another order on each rank.
        others = [r for r in _alive if r._open and r._task_of_backward() == ended.task]
        reached = sorted([self, *others], key=lambda reducer: reducer._age)
        for reducer in reached:
            reducer._start_rest(by_step=False)
        for reducer in reached:
            reducer._finish_round(by_step=False)

    def _task_of_backward(self) -> int | None:
        return None if self._backward is None else self._backward.task

    def _is_reduced(self, slot: Slot, grad: torch.Tensor) -> bool:
        """Whether this gradient is what a round of this step has made."""
        return slot.mark >= self._first_round and grad is slot.given

    def _take(self, slot: Slot, grad: torch.Tensor) -> None:
        """Copies a gradient to its place, which becomes `.grad`."""
        if grad is not slot.view and slot.is_kept():
            slot.leave_place()
        bucket, place = slot.bucket, slot.view
        assert bucket is not None
        assert place is not None
        if grad is not place:
            if slot.form is Form.ROWS:
                # `.grad` becomes the reduced rows when these are known.
                if not put_rows(slot, grad):
                    bucket.misplaced.append(slot.position)
                return
            if grad.is_sparse:
                if slot.form is Form.UNKNOWN:
                    # Its rows will be gathered.
                    place.zero_()
                    bucket.misplaced.append(slot.position)
                    return
                grad = grad.to_dense()
            if grad.requires_grad:
                # By create_graph: the graph hangs on this tensor, which stays `.grad`.
                place.copy_(grad.detach())
                slot.given = grad
                self._with_graph.append(slot)
                return
            place.copy_(grad)
        slot.param.grad = slot.given = place

    # Rounds.

    def _start_complete(self) -> None:
        if not self._gradients.known_alike():
            return
        buckets = self._gradients.buckets
        while self._next < len(buckets) and not buckets[self._next].pending:
            buckets[self._next].start()
            self._next += 1

    def _start_rest(self, by_step: bool) -> None:
        """Starts what has not started; waits for nothing but that the ranks are known alike."""
        self._gradients.require_alike()
        for bucket in self._gradients.buckets[self._next :]:
            if bucket.pending:
                self._fill_absent(bucket, by_step)
            bucket.start()
            self._next += 1
        if self._gradients.arrivals is not None:
            self._gradients.arrivals.post()

    def _finish_round(self, by_step: bool) -> None:
        """Starts what has not started, waits for everything, and ends the round."""
        self._open = True
        done = False
        try:
            self._start_rest(by_step)
            failures = [bucket.wait() for bucket in self._gradients.buckets]
            if self._gradients.arrivals is not None:
                failures.append(self._gradients.arrivals.wait())
            failure = next((text for text in failures if text is not None), None)
            if failure is not None:
                raise HorovodInternalError(failure)
            for bucket in self._gradients.buckets:
                if bucket.absent or bucket.unknown or bucket.in_rows:
                    self._read_presences(bucket)
            if self._gradients.sparse:
                self._exchange_rows(by_step)
            for slot in self._with_graph:
                assert slot.given is not None
                assert slot.view is not None
                slot.given.data.copy_(slot.view)
            done = True
        finally:
            self._backward = None
            if done:
                self._open, self._next = False, 0
                self._with_graph = []
                for bucket in self._gradients.buckets:
                    bucket.reset()
                self._round += 1
                self._communicated = True
                self._passes = 0
                self._has_unreduced = False
            else:
                self._cancel_round()
        if self._gradients.arrivals is not None:
            self._gradients.learn_order(self._round)

    def _cancel_round(self) -> None:
        """Ends a round without a result. What came to it waits for the next one."""
        self._open, self._next = False, 0
        self._with_graph = []
        if self._gradients.arrivals is not None:
            self._gradients.arrivals.forget()
        for bucket in self._gradients.buckets:
            bucket.reset()
        for slot in self._gradients.slots:
            if slot.mark == self._round:
                slot.mark, slot.dirty = -1, self._round
            if slot.dirty == self._round:
                slot.dirty += 1
        self._round += 1

    def _fill_absent(self, bucket: Bucket, by_step: bool) -> None:
        """Sees to the places to which this backward brought no gradient."""
        for position, slot in enumerate(bucket.slots):
            if slot.mark == self._round:
                continue
            grad = slot.param.grad
            if grad is not None and self._left_before(slot, grad, by_step):
                self._take(slot, grad)
                slot.mark = self._round
                continue
            assert slot.view is not None
            # What it holds must survive the round where it is `.grad`, or the user keeps it.
            if grad is slot.view:
                slot.given = None if slot.given is grad else slot.given
                slot.leave_place()
            elif slot.is_kept():
                slot.leave_place()
            slot.view.zero_()
            if slot.rows is not None:
                slot.rows.zero_()
            bucket.absent.append(position)

    def _left_before(self, slot: Slot, grad: torch.Tensor, by_step: bool) -> bool:
        """Whether a gradient counts in this round that its backward has not brought: one that
        earlier backwards left; in a round that `step` runs also one that the user may have set."""
        return (
            slot.dirty == self._round or (by_step and slot.param.requires_grad)
        ) and not self._is_reduced(slot, grad)

    def _read_presences(self, bucket: Bucket) -> None:
        """What the ranks have of each gradient, where that is not known."""
        gradients = self._gradients
        assert gradients.team is not None
        totals = bucket.totals()
        # What all ranks learn. One that has joined would not know it.
        learns = gradients.combining.is_everyone(totals[-1], gradients.team.size)
        for slot in bucket.unknown:
            total = totals[slot.position]
            if math.isinf(total):
                slot.form = Form.SPARSE
                gradients.sparse.append(slot)
            elif total and learns:
                slot.form = Form.DENSE
        bucket.unknown = [slot for slot in bucket.unknown if slot.form is Form.UNKNOWN]
        for slot in bucket.in_rows:
            total = totals[slot.position]
            is_dense = math.isinf(total)
            if is_dense and learns:
                slot.form = Form.DENSE
                gradients.stale = True
            if total:
                assert slot.view is not None
                slot.param.grad = slot.given = slot.view.clone() if is_dense else rows_in(slot)
                slot.mark = self._round
        for position in bucket.absent:
            slot = bucket.slots[position]
            if totals[position] and slot.form is not Form.SPARSE and slot.rows is None:
                slot.param.grad = slot.given = slot.view
                slot.mark = self._round

    def _exchange_rows(self, by_step: bool) -> None:
        """Reduces the sparse gradients, also those that this round has shown to be sparse."""
        gradients = self._gradients
        assert gradients.team is not None
        exchanges = []
        for number, slot in enumerate(gradients.sparse):
            what, grad = self._held(slot, by_step)
            exchange = RowExchange(
                f"{gradients.name}.sparse.{number}",
                slot.param,
                what,
                grad,
                gradients.combining,
                gradients.process_set,
                gradients.team.size,
            )
            exchanges.append((slot, exchange))
        for slot, exchange in exchanges:
            grad, all_held = exchange.finish()
            if grad is not None:
                if not all_held <= {Held.NOTHING, Held.ROWS}:
                    # As in one process: the sum of a sparse and a dense gradient is dense.
                    slot.form = Form.DENSE
                    grad = grad.to_dense()
                if Held.REDUCED in all_held:
                    assert slot.view is not None
                    grad += slot.view
                slot.param.grad = slot.given = grad
                slot.mark = self._round
            if slot.form is Form.SPARSE and gradients.sparse_as_dense:
                slot.form = Form.ROWS
                gradients.stale = True
            elif (slot.form is Form.SPARSE) == (slot.bucket is not None):
                gradients.stale = True
        gradients.sparse = [slot for slot in gradients.sparse if slot.form is Form.SPARSE]

    def _held(self, slot: Slot, by_step: bool) -> tuple[Held, torch.Tensor | None]:
        """What this rank has of a gradient whose rows are gathered."""
        grad = slot.param.grad
        if slot.bucket is not None:
            if slot.mark != self._round:
                return Held.NOTHING, None
            if slot.position not in slot.bucket.misplaced:
                return Held.REDUCED, None
        elif slot.mark != self._round and (
            grad is None or not self._left_before(slot, grad, by_step)
        ):
            return Held.NOTHING, None
        return held(grad), grad

    def _reached_again(self, slot: Slot) -> RuntimeError:
        if slot.mark == self._round:
            return RuntimeError(
                f"the gradient of {slot.name!r} came twice in one reduction, by reentrant "
                "checkpoints; pass use_reentrant=False to them"
            )
        return RuntimeError(
            f"backward() reached {slot.name!r}, whose gradient was reduced in this step already. "
            "To accumulate gradients over several backwards, pass backward_passes_per_step to "
            "DistributedOptimizer, or run all but the last inside no_sync(); to start anew, call "
            "the optimizer's zero_grad()"
        )


def release(params: Iterable[torch.Tensor]) -> None:
    """Takes the parameters from the optimizers that have any of them: they belong to the newest
    one, and are reduced once."""
    by_id = {id(param): param for param in params}
    for reducer in list(_alive):
        reducer.release(by_id)
