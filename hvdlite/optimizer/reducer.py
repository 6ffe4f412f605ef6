"""Reduces gradients while backward still runs: gradient hooks → buckets → the engine's plans.

A **round** is one reduction of all gradients. Every rank runs the same rounds in the same order,
and within a round starts the buckets in the order of their index; so the ranks negotiate nothing.

- A hook runs as soon as autograd has accumulated a parameter's gradient. It copies the gradient to
  its place in its bucket, and that place becomes `.grad`: the reduced values need no copy out.
  Most of it is in C (`_core/python/python_gradients.c`), and the rest in `Reducer._on_gradient`.
- A bucket starts when it and all buckets before it are complete.
- When backward ends, a callback of autograd fills the places of missing gradients with zeros,
  starts the remaining buckets, and waits: `backward()` returns with reduced gradients.
- A rank whose backward reached no parameter runs its round in `step`.
- In a world of one there are no hooks, and `.grad` stays as autograd made it.

Each gradient in a bucket travels with one number, its mask: 1 if the rank has it, else 0. If
the sum is 0, no rank has that gradient, and `.grad` stays as it was.

Sparse gradients have no place in a bucket once all ranks know that they are sparse. The ranks learn
it from the mask, which is infinite then. Their rows are gathered at the end of the round.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from hvdlite import _core
from hvdlite.errors import HorovodInternalError, folded
from hvdlite.observe import program, summary
from hvdlite.optimizer import together
from hvdlite.optimizer.arguments import ParameterNames
from hvdlite.optimizer.backward_pass import BackwardPass, current_task
from hvdlite.optimizer.buckets.bucket import Combining
from hvdlite.optimizer.buckets.positions import Position
from hvdlite.optimizer.buckets.slot import Form, Slot
from hvdlite.optimizer.checks.changed_in_backward import changed_in_words
from hvdlite.optimizer.checks.reached_again import reached_again
from hvdlite.optimizer.checks.same_values import Entry
from hvdlite.optimizer.gradients import Gradients
from hvdlite.optimizer.micro_batches import MicroBatches
from hvdlite.optimizer.round import Round
from hvdlite.optimizer.sharding.shards import Shards
from hvdlite.optimizer.uncompiled import uncompiled
from hvdlite.optimizer.weights import Weights, WeightsAlone
from hvdlite.world.teams.process_sets import ProcessSet
from hvdlite.world.teams.team import Team

log = logging.getLogger("hvdlite")

_ages = itertools.count()


@dataclass
class Step:
    """What has come before the next step of the optimizer.

    passes: since the last round, the backward passes that count for passes_per_step, that is, those
    outside no_sync(). has_unreduced: whether there was any backward pass since. communicated: its
    gradients, or some of them, are reduced. added: parameters were added since. not_finite: what
    its rounds have found of NaN and infinite gradients, in words.
    """

    passes: int = 0
    has_unreduced: bool = False
    communicated: bool = False
    added: bool = False
    not_finite: str | None = None


class Reducer:
    """Reduces the gradients of one optimizer. Its hooks live until `detach`.

    gradients: their buckets. weights: those of this rank's backward passes. micro_batches: what
    virtual ranks ask for. round: the open one, or None. position: which backward of which step.
    """

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
        besides: Callable[[], list[Entry]],
        shards: Shards | None = None,
        frees: bool = False,
    ) -> None:
        """passes: the number of backward passes per round. For the other arguments see
        `Gradients`."""
        # What the hooks know: the number of the round (or of the next one), that of the step's
        # first one, whether one is open, and whether a backward pass runs.
        self.arrivals = _core.Arrivals(self._on_gradient, self._on_complete)
        self.gradients = Gradients(
            groups,
            names,
            combining,
            first_form,
            sparse_as_dense,
            optimizer,
            process_set,
            check_start,
            besides,
            self.arrivals,
            shards,
            frees,
        )
        self.weights = Weights()
        self.micro_batches = MicroBatches(self.gradients)
        self.alone = WeightsAlone(self.weights, self.accumulates)
        self.groups = groups
        # Greater than that of all reducers made earlier.
        self.age = next(_ages)
        self.lock = threading.RLock()
        self.round: Round | None = None
        # This rank's position; and the team and era in which it is counted.
        self.position = Position()
        self._counts_since: tuple[Team | None, int] = (None, 0)
        # The number of backward passes per round that the script has chosen; and whether they
        # count: not inside no_sync().
        self._passes_chosen = passes
        self.communicates = True
        self.step = Step()
        # The backward pass that has begun and has not reached its end; it may have raised. And the
        # graph task of autograd whose gradients arrive.
        self._backward: BackwardPass | None = None
        self._task = -1
        # The reduction in `step` has raised.
        self._step_raised = False
        # This rank, or another, has given up the gradients of this step: zero_grad() comes next.
        self.must_zero = False
        # The parameters whose changes in the backward pass are looked for; the one whose gradient
        # was removed before hvdlite's hook ran; and what has changed in them, in words.
        self._watched: list[Slot] = []
        self._without_gradient: Slot | None = None
        self._changed: str | None = None
        # GradScaler was told to make a step and has not made it yet; it may skip it.
        self.step_is_due = False
        together.alive.add(self)

    # Called by the optimizer.

    @folded
    def settle(self) -> None:
        """Gives up the round of a backward or step that has raised here; blocks then.

        Raises:
            RuntimeError: A backward is reducing gradients.
            HorovodInternalError: The round has failed otherwise.
        """
        if self.round is not None and self.in_backward():
            raise RuntimeError(
                "zero_grad() was called while backward() is reducing gradients; call it after "
                "backward() has returned"
            )
        if self.round is None and not self._has_raised():
            return
        round_ = self._to_give_up()
        if round_ is not None:
            try:
                together.give_up_rounds(self)
            except HorovodInternalError:
                # (What has raised was an error here already.)
                if not round_.was_given_up:
                    raise

    @folded
    def finish(self) -> None:
        """Reduces all gradients of this step that are not reduced yet. Blocks.

        Raises:
            HorovodInternalError: The reduction failed.
        """
        self.forget_skipped_step()
        self.refuse_raised()
        if self.round is None:
            if self.step.communicated and not self.step.has_unreduced and not self.has_added():
                return
            self.micro_batches.require_all(self.step.passes)
        try:
            if self.round is None:
                self.gradients.rebuild_if_changed()
                self.open_round()
            together.finish_rounds(self)
        except BaseException as error:
            self._step_raised = not isinstance(error, HorovodInternalError)
            self._on_raise(None)
            raise
        self.step.added = False

    def _has_raised(self) -> bool:
        """Whether the last backward pass of this step, unless in no_sync(), or the reduction in
        `step`, has raised here."""
        backward = self._backward
        if backward is None or self.in_backward():
            return self._step_raised
        return backward.communicates

    @folded
    def refuse_raised(self) -> None:
        """Before a step with what the last backward pass has left.

        Raises:
            RuntimeError: That, or the reduction, has raised, here or elsewhere.
            HorovodInternalError: Only here: the same error as on all ranks.
        """
        if self.must_zero or self._has_raised():
            self._refuse()

    def _to_give_up(self) -> Round | None:
        """The round for which other ranks may wait; None if their world has ended."""
        if not self.gradients.are_current():
            if self.round is not None:
                self.cancel_round()
        elif self.round is None:
            self.gradients.rebuild_if_changed()
            self.open_round()
        return self.round

    def _refuse(self) -> NoReturn:
        """Gives up what has raised, on all ranks; the program must say that it goes on."""
        if not self.must_zero:
            self.must_zero = True
            if self._to_give_up() is not None:
                together.give_up_rounds(self)
        raise RuntimeError(
            "the last backward() or step() raised, so that none of its gradients are used; call "
            "the optimizer's zero_grad() before the next backward() or step()"
        )

    def has_added(self) -> bool:
        """Whether the optimizer has new parameters since the gradients of this step were reduced:
        those of these may have come before, and are not. The same on all ranks."""
        return self.step.communicated and (self.step.added or not self.gradients.has_all())

    def begin_step(self) -> None:
        """The step begins to change the parameters."""
        self.position.begin_step()

    def end_step(self) -> None:
        """The step has changed the parameters."""
        self.position.end_step()
        gradients = self.gradients
        members = gradients.team.ranks if gradients.team else ()
        summary.step_ended(self.age, gradients.name, members)
        self.next_step()
        self.gradients.free()

    def steps_since_join(self) -> int:
        """Between two steps: how many there have been in this world and since its last join. The
        same on all ranks that have not joined."""
        return self.position.phase // 2

    def next_step(self) -> None:
        """The gradients are used or zeroed: the next backward belongs to another step."""
        self.settle()
        self.arrivals.number += 1
        self.arrivals.first_of_step = self.arrivals.number
        text, self.step = self.step.not_finite, Step()
        self._backward, self.arrivals.in_backward = None, False
        self._step_raised = self.must_zero = False
        self._task = -1
        self._watched, self._changed = [], None
        team = self.gradients.team
        if text is not None and team is not None and team.rank == 0:
            log.warning("%s. No step was made with these gradients", text)
        self.step_is_due = False
        self.weights.end_step()
        self.micro_batches.forget()

    @property
    def passes_per_step(self) -> int:
        """The number of backward passes per round."""
        return self.micro_batches.number or self._passes_chosen

    def set_passes_per_step(self, passes: int) -> None:
        """From now on every `passes`-th backward pass communicates; counted from now."""
        self.micro_batches.require_passes(passes)
        self._passes_chosen = passes
        self.step.passes = 0

    def short_of_passes(self) -> tuple[int, int] | None:
        """How many backward passes count in this step, and how many should, if `finish` would cut
        an accumulation short; else None."""
        if not 0 < self.step.passes < self.passes_per_step or self.step_is_due:
            return None
        if self.micro_batches.number:
            return None  # an error follows
        return self.step.passes, self.passes_per_step

    def has_communicated(self) -> bool:
        """Whether this step's gradients, or some of them, are already reduced."""
        return self.step.communicated

    def expect_step(self) -> None:
        """GradScaler is told to make a step, which it may skip."""
        self.forget_skipped_step()
        self.step_is_due = True

    def forget_skipped_step(self) -> None:
        if self.step_is_due:
            self.next_step()

    def detach(self) -> None:
        """Removes the hooks; from now on the reducer does nothing."""
        self.gradients.detach()
        together.alive.discard(self)

    def release(self, params: Mapping[int, torch.Tensor]) -> None:
        """Stops reducing the gradients of these parameters. params: by their ids."""
        if not self.gradients.release(params):
            self.detach()

    def note_parameters(self) -> None:
        """The optimizer may have new parameters, and the next backward may reach only these."""
        if self.round is None:
            generation = self.gradients.generation
            self.gradients.rebuild_if_changed()
            self.step.added |= self.step.communicated and self.gradients.generation != generation

    def accumulates(self) -> bool:
        """Whether the next backward pass, or the one that has begun, adds to the gradients of other
        passes, or others to its own."""
        return self.weights.total is not None or not self.communicates_next()

    def communicates_next(self) -> bool:
        """Whether the next backward pass, or the one that has begun, ends with a round."""
        return self.communicates and self.step.passes + 1 >= self.passes_per_step

    # A backward pass.

    @uncompiled
    def _on_gradient(self, slot: Slot, param: torch.Tensor) -> None:
        """Autograd has accumulated this parameter's gradient, and that needs more than a hook does
        by itself. Runs in a thread of autograd."""
        with self.lock:
            task = current_task()
            if task != self._task:
                self._begin_backward(task, slot)
            grad = param.grad
            if grad is None:
                self._without_gradient = slot
                return
            self.micro_batches.note(slot, grad, self.round is not None)
            if self.weights.total is not None and not slot.has_come():
                slot.weighed = [True] if slot.arrives_weighed else []
            slot.arrives_weighed = False
            if slot.has_come() or slot.is_reduced(grad):
                if not slot.has_come():
                    self.micro_batches.require_first_round(slot)
                error = reached_again(slot, self.passes_per_step)
                if self.round is not None and not self.round.has_started():
                    self.cancel_round()
                raise error
            if self.round is None:
                slot.unreduced_round = self.arrivals.number
                return
            backward_order = self.gradients.backward_order
            if backward_order is not None:
                backward_order.note(slot)
            if slot.bucket is None:
                slot.note_arrival()
                return
            self.round.copy_to_bucket(slot, grad)
            if slot.count_down():
                slot.bucket.gather()
                self.round.start_complete()

    @uncompiled
    def _on_complete(self) -> None:
        """The hooks have brought all gradients of a bucket."""
        with self.lock:
            if self.round is not None:
                self.round.start_complete()

    def _begin_backward(self, task: int, slot: Slot) -> None:
        """The slot's is the first gradient of a backward pass, or of one inside it (reentrant
        checkpoints)."""
        if self.in_backward():
            self._task = task
            return
        self.forget_skipped_step()
        raised = self._backward is not None
        if self.must_zero or (self.round is not None and self.round.has_started()):
            # The other ranks wait for it, however the program handles the error.
            self._refuse()
        if self.round is not None:
            self.cancel_round()
            if self.weights.total is not None and not self.weights.add_up:
                raise RuntimeError(
                    "the last backward() raised, and left gradients that have the weight of "
                    "set_weight(); call the optimizer's zero_grad() and set_weight() before the "
                    "next backward()"
                )
        self._backward = BackwardPass(self._end_backward, self._on_raise, self.communicates)
        gradients = self.gradients
        gradients.rebuild_if_changed()
        self.micro_batches.begin(self.step.passes, slot, raised, self.step.communicated)
        self.weights.begin_pass(gradients.slots, adds_up=not self.communicates_next())
        self._task = task
        program.backward_began(self.age)
        # A backward that raises does not count as a pass, but may leave gradients.
        self.step.has_unreduced = True
        if self.communicates_next():
            self.open_round()
        has_others = gradients.team is not None and gradients.team.size > 1
        self._watched = gradients.slots if has_others else []
        self._without_gradient = None
        self.arrivals.note_versions(self._watched)
        is_observed = self.round is not None and gradients.backward_order is not None
        self.arrivals.is_plain = not (
            is_observed or self.weights.total is not None or self.micro_batches.number
        )
        self.arrivals.in_backward = True

    def look_for_changes(self) -> None:
        """The backward pass has ended, and its round has not: looks whether the script has made
        steps meanwhile."""
        self.arrivals.in_backward = False
        watched, self._watched = self._watched, []
        if watched:
            slot = self._without_gradient or self.arrivals.changed(watched)
            self._changed = None if slot is None else changed_in_words(slot)

    @uncompiled
    @folded
    def _end_backward(self) -> None:
        """All gradients of the backward are there."""
        if self._backward is None:
            # Another optimizer's end of the same backward has ended this round too.
            self._require_unchanged()
            return
        if self.round is None:
            self.look_for_changes()
            self.micro_batches.end(self.step.passes)
        if self.communicates:
            self.step.passes += 1
        if self.round is not None:
            try:
                together.finish_rounds(self, at_end=True)
            except HorovodInternalError:
                self._require_unchanged()  # ranks that train alone may have made it fail
                raise
        else:
            self._backward = None
            program.backward_ended(self.age, self.gradients.name)
        self._require_unchanged()

    def _require_unchanged(self) -> None:
        text, self._changed = self._changed, None
        if text is not None:
            raise RuntimeError(text)

    def _on_raise(self, _: object) -> None:
        """The backward pass, or `step`, has raised."""
        self.arrivals.in_backward = False
        if self.round is not None:
            self.round.withdraw_grads()

    def in_backward(self) -> bool:
        """Whether a backward pass runs."""
        return self._backward is not None and self._backward.runs()

    def task_of_backward(self) -> int | None:
        return None if self._backward is None else self._backward.task

    # A round begins and ends.

    def open_round(self) -> None:
        """Begins one; other ranks don't know of it yet. Blocks if parameters are in flight."""
        team = self.gradients.team
        if self._counts_since != (since := (team, team.era if team else 0)):
            self.position.restart()
            self._counts_since = since
        begun = Round(
            self.gradients,
            self.weights,
            self.micro_batches,
            self.position,
            of_backward=self._backward is not None,
            begun_here=lambda: together.begun_here(self),
        )
        self.round, self.arrivals.is_open = begun, True

    def collect_round(self) -> None:
        """Waits for the round, gives all gradients their reduced values, and closes it.

        Raises:
            HorovodInternalError: The reduction failed.
        """
        round_ = self.round
        assert round_ is not None
        try:
            self.end_part(round_.collect)
        finally:
            self.must_zero = self.must_zero or round_.was_given_up
        gradients, position, weights = self.gradients, self.position, self.weights
        not_finite = self.step.not_finite or round_.not_finite
        position.rounds += 1
        weights.last, weights.total = weights.total, None
        self.step = Step(communicated=True, not_finite=not_finite)
        self._close_round()
        gradients.had_a_round = True
        self.micro_batches.forget()
        if gradients.backward_order is not None:
            gradients.learn_order()
        if gradients.shards is not None:
            gradients.shards.take_gradients(gradients)

    def end_part(self, part: Callable[[], None]) -> None:
        """Runs a part of the round's end. If it fails on all ranks, the round is over. After any
        other error, such as one that a signal's handler raises, the round is to be given up."""
        try:
            part()
        except BaseException as error:
            if isinstance(error, HorovodInternalError) or not self.gradients.are_current():
                self.cancel_round()
            raise

    def cancel_round(self) -> None:
        """Ends a round without a result; none of it is in flight. Gradients that have come count in
        the next round."""
        if self.gradients.backward_order is not None:
            self.gradients.backward_order.forget()
        for slot in self.gradients.slots:
            slot.put_off()
        self.micro_batches.spoil()
        self.arrivals.in_backward = False
        self._close_round()

    def _close_round(self) -> None:
        self.round, self.arrivals.is_open = None, False
        self.arrivals.number += 1
        self._backward = None

    def learn_if_due(self) -> None:
        """What an interruption has kept the last round from learning. Collective then."""
        order = self.gradients.backward_order
        if self.round is None and order is not None and order.posted():
            self.gradients.learn_order()
        if self.gradients.shards is not None:
            self.gradients.shards.take_gradients(self.gradients)
