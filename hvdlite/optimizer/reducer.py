"""Reduces gradients while backward still runs: gradient hooks → buckets → the engine's plans.

A **round** is one reduction of all gradients. Every rank runs the same rounds in the same order,
and within a round starts the buckets in the order of their index; so the ranks negotiate nothing.

- A hook runs as soon as autograd has accumulated a parameter's gradient. It copies the gradient to
  its place in its bucket, and that place becomes `.grad`: the reduced values need no copy out.
- A bucket starts when it and all buckets before it are complete.
- When backward ends, a callback of autograd fills the places of missing gradients with zeros,
  starts the remaining buckets, and waits: `backward()` returns with reduced gradients.
- A rank whose backward reached no parameter runs its round in `step`.

Each gradient in a bucket travels with one number, its presence: 1 if the rank has it, else 0. If
the sum is 0, no rank has that gradient, and `.grad` stays as it was.

Sparse gradients have no place in a bucket once all ranks know that they are sparse. The ranks learn
it from the presence, which is infinite then. Their rows are gathered at the end of the round.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from hvdlite.errors import HorovodInternalError, NumericsError
from hvdlite.observe import program, summary, waits
from hvdlite.optimizer.arguments import ParameterNames
from hvdlite.optimizer.backward_pass import BackwardPass, current_task
from hvdlite.optimizer.buckets.bucket import Combining, Form, Slot
from hvdlite.optimizer.gradients import Gradients
from hvdlite.optimizer.losses import loss_of_all
from hvdlite.optimizer.overlap import on_the_way
from hvdlite.optimizer.sharding.shards import Shards
from hvdlite.optimizer.weighted_rounds import WeightedRounds
from hvdlite.world.teams.process_sets import ProcessSet
from hvdlite.world.telling import last_line

log = logging.getLogger("hvdlite")

_alive: weakref.WeakSet[Reducer] = weakref.WeakSet()
_ages = itertools.count()

# A rank that waits for the round of one optimizer looks so often whether another's is given up. The
# engine takes a wait of 0.2 s for one that only another rank can end (watching/circle.c), and those
# of this rank and of one that gives up would be a circle.
_LOOKS_EVERY_S = 0.1
# After some looks within a backward it waits for longer, so that a real circle is named; none is an
# error there.
_SHORT_LOOKS = 20
_LOOKS_LATER_EVERY_S = 1.0


class Reducer(WeightedRounds):
    """Reduces the gradients of one optimizer. Its hooks live until `detach`."""

    def __init__(
        self,
        groups: Callable[[], Sequence[dict[str, Any]]],
        names: ParameterNames,
        combining: Combining,
        *,
        passes: int,
        first_form: Form,
        sparse_as_dense: bool,
        optimizer: str,
        process_set: ProcessSet,
        check_start: bool,
        shards: Shards | None = None,
        frees: bool = False,
    ) -> None:
        """passes: the number of backward passes per round. For the other arguments see
        `Gradients`."""
        super().__init__(
            Gradients(
                groups,
                names,
                combining,
                first_form,
                sparse_as_dense,
                optimizer,
                process_set,
                check_start,
                self._on_gradient,
                shards,
                frees,
            )
        )
        self._groups = groups
        self._passes_chosen = passes
        # The graph task of autograd whose gradients arrive.
        self._task = -1
        # GradScaler was told to make a step and has not made it yet; it may skip it.
        self.step_is_due = False
        # Greater than that of every reducer made earlier.
        self._age = next(_ages)
        _alive.add(self)

    # Called by the optimizer.

    def settle(self) -> None:
        """Ends the round of a backward that has raised, if other ranks wait for it; blocks then.

        Raises:
            RuntimeError: A backward is reducing gradients.
            HorovodInternalError: The reduction failed.
        """
        if self._open:
            if self._backward is not None and self._backward.runs():
                raise RuntimeError(
                    "zero_grad() was called while backward() is reducing gradients; call it after "
                    "backward() has returned"
                )
            if self._has_started():
                self._give_up_rounds()

    def finish(self) -> None:
        """Reduces all gradients of this step that are not reduced yet. Blocks.

        Raises:
            HorovodInternalError: The reduction failed.
        """
        self._forget_skipped_step()
        if self._backward is not None and not self._backward.runs():
            self.micro_batches.require_ended(self._passes)
        if not self._open:
            if self._communicated and not self._has_unreduced:
                return
            self.micro_batches.require_all(self._passes)
            self.gradients.rebuild_if_changed(self._round)
            self._open_round()
        try:
            self._finish_rounds()
        except BaseException:
            self._withdraw_grads(None)
            raise

    def begin_step(self) -> None:
        """The step begins to change the parameters."""
        self._position.begin_step()

    def end_step(self) -> None:
        """The step has changed the parameters."""
        self._position.end_step()
        gradients = self.gradients
        members = gradients.team.ranks if gradients.team else ()
        summary.step_ended(self._age, gradients.name, members)
        self.next_step()
        self.gradients.free()

    def require_finite(
        self, is_skipped: Callable[[], bool] = lambda: False, in_closure: bool = False
    ) -> None:
        """Before a step with reduced gradients, which changes nothing if this raises.

        is_skipped: whether the step changes nothing anyway; asked only if there is something to
            raise. in_closure: an optimizer that calls its closure several times may have changed
            parameters before.

        Raises:
            NumericsError: HVDLITE_CHECK_NUMERICS has found that they are not finite; on every rank.
        """
        if self._not_finite is None or is_skipped():
            return
        text, self._not_finite = self._not_finite, None
        what = "The parameters are as they were when the closure was called"
        raise NumericsError(f"{text}. {what if in_closure else 'No parameter has changed'}")

    def steps_since_join(self) -> int:
        """Between two steps: how many there have been in this world and since its last join. The
        same on all ranks that have not joined."""
        return self._position.phase // 2

    def loss_of_all(self, loss: Any) -> Any:
        """After `finish`: the combined loss of all ranks. Blocks."""
        gradients = self.gradients
        if gradients.team is None or gradients.team.size == 1:
            return loss
        name, op = f"{gradients.name}.loss", gradients.combining.op
        return loss_of_all(loss, name, op, gradients.process_set, self.weights.last)

    def next_step(self) -> None:
        """The gradients are used or zeroed: the next backward belongs to another step."""
        self.settle()
        if self._open:
            self._cancel_round()
        self._round += 1
        self._first_round = self._round
        self._communicated = False
        self._passes = 0
        self._has_unreduced = False
        self._backward = None
        self._task = -1
        text, self._not_finite = self._not_finite, None
        team = self.gradients.team
        if text is not None and team is not None and team.rank == 0:
            log.warning("%s. No step was made with these gradients", text)
        self.step_is_due = False
        self.weights.end_step()
        self.micro_batches.forget()

    def short_of_passes(self) -> tuple[int, int] | None:
        """How many backward passes count in this step, and how many should, if `finish` would cut
        an accumulation short; else None."""
        if not 0 < self._passes < self.passes_per_step or self.step_is_due:
            return None
        if self.micro_batches.number:
            return None  # an error follows
        return self._passes, self.passes_per_step

    def has_communicated(self) -> bool:
        """Whether this step's gradients, or some of them, are already reduced."""
        return self._communicated

    def expect_step(self) -> None:
        """GradScaler is told to make a step, which it may skip."""
        self._forget_skipped_step()
        self.step_is_due = True

    def _forget_skipped_step(self) -> None:
        if self.step_is_due:
            self.next_step()

    def _params_alone(self) -> list[torch.Tensor]:
        reduced = {id(param) for reducer in _alive for param in reducer.gradients.params()}
        params = (param for group in self._groups() for param in group["params"])
        return [param for param in params if id(param) not in reduced]

    def set_passes_per_step(self, passes: int) -> None:
        self.micro_batches.require_passes(passes)
        self._passes_chosen = passes
        self._passes = 0

    def detach(self) -> None:
        """Removes the hooks; from now on the reducer does nothing."""
        self.gradients.detach()
        _alive.discard(self)

    def release(self, params: Mapping[int, torch.Tensor]) -> None:
        """Stops reducing the gradients of these parameters. params: by their ids."""
        if not self.gradients.release(params):
            self.detach()

    def note_parameters(self) -> None:
        """The optimizer may have new parameters, and the next backward may reach only these."""
        if not self._open:
            self.gradients.rebuild_if_changed(self._round)

    # Hooks.

    def _on_gradient(self, slot: Slot, param: torch.Tensor) -> None:
        """Autograd has accumulated this parameter's gradient. Runs in a thread of autograd."""
        with self._lock:
            task = current_task()
            if task != self._task:
                self._begin_backward(task, slot)
            grad = param.grad
            if grad is None:
                return  # a hook of the user has removed it
            self.micro_batches.note(slot, grad, self._open)
            if self.weights.total is not None and slot.last_round != self._round:
                slot.weighed = [True] if slot.arrives_weighed else []
            slot.arrives_weighed = False
            if slot.last_round == self._round or self._is_reduced(slot, grad):
                error = self._reached_again(slot)
                if self._open and not self._has_started():
                    self._cancel_round()
                raise error
            if not self._open:
                slot.unreduced_round = self._round
                return
            backward_order = self.gradients.backward_order
            if backward_order is not None:
                backward_order.note(slot)
            bucket = slot.bucket
            if bucket is not None:
                self._copy_into_bucket(slot, grad)
            slot.last_round = self._round
            if bucket is None:
                return
            bucket.pending -= 1
            if not bucket.pending:
                self._start_complete()

    def _begin_backward(self, task: int, slot: Slot) -> None:
        """The slot's is the first gradient of a backward pass, or of one inside it (reentrant
        checkpoints)."""
        if self._backward is not None and self._backward.runs():
            self._task = task
            return
        self._forget_skipped_step()
        raised = self._backward is not None
        if self._open:
            if self._has_started():
                # The other ranks wait for it, however the program handles the error.
                self._give_up_rounds()
                raise RuntimeError(
                    "the last backward() raised after other ranks had begun to reduce its "
                    "gradients, so these are reduced, and no others can be added to them; call the "
                    f"optimizer's {self._ways_on()} before the next backward()"
                )
            self._cancel_round()
            if self.weights.total is not None and not self.weights.add_up:
                raise RuntimeError(
                    "the last backward() raised, and left gradients that have the weight of "
                    "set_weight(); call the optimizer's zero_grad() and set_weight() before the "
                    "next backward()"
                )
        self.gradients.rebuild_if_changed(self._round)
        self.micro_batches.begin(self._passes, slot, raised, self._communicated)
        self.weights.begin_pass(self.gradients.slots, adds_up=not self._communicates_next())
        self._task = task
        self._backward = BackwardPass(self._end_backward, self._withdraw_grads)
        program.backward_began(self._age)
        # A backward that raises does not count as a pass, but may leave gradients.
        self._has_unreduced = True
        if self._communicates_next():
            self._open_round()

    def _ways_on(self) -> str:
        return "zero_grad()" if self.micro_batches.number else "step() or zero_grad()"

    def _end_backward(self) -> None:
        """All gradients of the backward are there."""
        if self._backward is None:
            return  # another optimizer's end of the same backward has ended this round too
        if not self._open:
            self.micro_batches.end(self._passes)
        if self.communicates:
            self._passes += 1
        if self._open:
            self._finish_rounds(at_end=True)
        else:
            self._backward = None
            program.backward_ended(self._age, self.gradients.name)

    def _ends_within(self, limit_s: float) -> bool:
        """Whether the round can be collected by then. (A GPU's can only be waited for without a
        limit.)"""
        carrier = self.gradients.carrier
        return carrier is None or carrier.in_lane or carrier.ends_within(limit_s)

    def _is_given_up(self) -> bool:
        """Whether all ranks have told that their positions differ, or that they give the round up.
        Does not block."""
        carrier = self.gradients.carrier
        if carrier is None or carrier.in_lane or not carrier.ends_within(0):
            return False
        carrier.wait()
        exchange = self._exchange_positions()
        return exchange is not None and exchange.has_ended()

    def _task_of_backward(self) -> int | None:
        return None if self._backward is None else self._backward.task

    def _give_up_rounds(self) -> None:
        """Ends the rounds of a backward that has raised, without making a step with its gradients.

        Raises:
            HorovodInternalError: On other ranks it has not raised, and they would make the step:
                the same error there.
        """
        for reducer in self._reached(at_end=False):
            reducer._give_up()
        self._finish_rounds()

    def _finish_rounds(self, at_end: bool = False) -> None:
        """Ends the open round, and those of all other optimizers that its backward has reached.
        First starts everything, which does not wait for other rounds, then waits.

        at_end: see `_reached`.
        """
        reached = self._reached(at_end)
        for reducer in reached:
            if at_end:
                reducer._by_step = False
                program.backward_ended(reducer._age, reducer.gradients.name)
            reducer._cancel_if_it_fails(reducer._start_rest)
        left = list(reached)
        differs = None
        joined: dict[Reducer, list[torch.Tensor | None]] = {}
        while left:
            reducer = _first_to_end(left)
            try:
                reducer._cancel_if_it_fails(reducer._collect)
            except HorovodInternalError as error:
                if reducer._begun_anywhere is None:
                    raise
                differs = differs or error
            else:
                reducer._close_round()
                if reducer in joined:
                    reducer._forget_round(joined[reducer])
            left.remove(reducer)
            for other in reducer._take_part([*reached, *joined]):
                left.append(other)
                joined[other] = [slot.param.grad for slot in other.gradients.slots]
        if differs is not None:
            raise differs

    def _begun_here(self) -> list[int]:
        team, task = self.gradients.team, self._task_of_backward()
        return [
            reducer.gradients.number
            for reducer in _alive
            if reducer is self
            or (
                reducer._open
                and reducer.gradients.team is team
                and reducer._task_of_backward() == task
                and reducer._has_started()
            )
        ]

    def _take_part(self, known: Sequence[Reducer]) -> list[Reducer]:
        """After a round in which backward has raised somewhere: begins the rounds that other ranks
        have begun in the same backward, and wait for, and gives them up. Returns them."""
        begun = self._begun_anywhere
        if begun is None:
            return []
        others = [
            reducer
            for reducer in _alive
            if reducer is not self
            and reducer not in known
            and reducer.gradients.team is self.gradients.team
            and reducer.gradients.number in begun
        ]
        others.sort(key=lambda reducer: reducer._age)
        for reducer in others:
            if not reducer._open:
                reducer.gradients.rebuild_if_changed(reducer._round)
                reducer._open_round()
            reducer._give_up()
            reducer._cancel_if_it_fails(reducer._start_rest)
        return others

    def _forget_round(self, grads: Sequence[torch.Tensor | None]) -> None:
        """After a round in which this rank has only taken part: its program may have called
        zero_grad() before. grads: of all slots, before the round."""
        for slot, grad in zip(self.gradients.slots, grads, strict=True):
            slot.param.grad = grad
        self.next_step()

    def _give_up(self) -> None:
        """Says so in the open round, unless all gradients are there and the position is on its way:
        then the other ranks make the step."""
        carrier = self.gradients.carrier
        if carrier is None or not carrier.runs:
            self._position.has_raised = True

    def _reached(self, at_end: bool) -> list[Reducer]:
        """This reducer and those of all other optimizers that its backward has reached, in the same
        order on all ranks: autograd may reach their ends in a different order on each.

        at_end: the backward has ended. Otherwise it has raised, and only rounds that other ranks
            may wait for are ended with it.
        """
        task = self._task_of_backward()
        reached = [
            reducer
            for reducer in _alive
            if reducer is self
            or (
                reducer._open
                and task is not None
                and reducer._task_of_backward() == task
                and (at_end or not reducer._by_step or reducer._has_started())
            )
        ]
        return sorted(reached, key=lambda reducer: reducer._age)

    def _reached_again(self, slot: Slot) -> RuntimeError:
        if slot.last_round == self._round:
            return RuntimeError(
                f"the gradient of {slot.name!r} came twice in one reduction, because of reentrant "
                "checkpoints; pass use_reentrant=False to torch.utils.checkpoint.checkpoint"
            )
        self.micro_batches.require_first_round(slot)
        return RuntimeError(
            f"backward() reached {slot.name!r}, whose gradient is already reduced in this step. "
            "To accumulate gradients over several backward passes, pass backward_passes_per_step "
            "to DistributedOptimizer, or run all but the last inside no_sync(); to start over, "
            "call the optimizer's zero_grad()"
        )


def _first_to_end(reducers: Sequence[Reducer]) -> Reducer:
    """The round to collect next: the first one, as on all ranks. Blocks until it has ended. Or else
    one that is given up: a rank whose backward has raised may not have begun the first one, and
    waits in the one that it has begun for what this rank has to say."""
    if len(reducers) > 1:
        last_line.look()
        if waits.observed():
            with waits.waiting(f"hvdlite::{reducers[0].gradients.name} waits for its gradients"):
                return _given_up_before_the_first(reducers)
        return _given_up_before_the_first(reducers)
    return reducers[0]


def _given_up_before_the_first(reducers: Sequence[Reducer]) -> Reducer:
    """Or the first one, when it has ended."""
    first, *others = reducers
    looks = 0
    while not first._ends_within(_LOOKS_EVERY_S if looks < _SHORT_LOOKS else _LOOKS_LATER_EVERY_S):
        looks += current_task() != -1
        for reducer in others:
            if reducer._is_given_up():
                return reducer
    return first


def release(params: Iterable[torch.Tensor]) -> None:
    """Makes all existing optimizers stop reducing these parameters: they belong to the newest
    optimizer, and are reduced once. Blocks if they are on the way."""
    by_id = {id(param): param for param in params}
    on_the_way.wait_for(by_id.values())
    for reducer in list(_alive):
        reducer.release(by_id)
