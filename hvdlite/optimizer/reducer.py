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

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from hvdlite import _core
from hvdlite.errors import HorovodInternalError, NumericsError
from hvdlite.observe import program, summary
from hvdlite.optimizer.arguments import ParameterNames
from hvdlite.optimizer.backward_pass import BackwardPass, current_task
from hvdlite.optimizer.backward_rounds import BackwardRounds, alive
from hvdlite.optimizer.buckets.bucket import Combining
from hvdlite.optimizer.buckets.slot import Form, Slot
from hvdlite.optimizer.checks.changed_in_backward import changed_in_words
from hvdlite.optimizer.checks.same_values import Entry
from hvdlite.optimizer.gradients import Gradients
from hvdlite.optimizer.losses import loss_of_all
from hvdlite.optimizer.overlap import on_the_way
from hvdlite.optimizer.sharding.shards import Shards
from hvdlite.optimizer.uncompiled import uncompiled
from hvdlite.own_names import own_name
from hvdlite.world.teams.process_sets import ProcessSet

log = logging.getLogger("hvdlite")


class Reducer(BackwardRounds):
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
        besides: Callable[[], list[Entry]],
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
                besides,
                _core.Round(self._on_gradient, self._on_complete),
                shards,
                frees,
            )
        )
        self._groups = groups
        self._passes_chosen = passes
        # The graph task of autograd whose gradients arrive.
        self._task = -1
        # Parameters were added after this step's gradients were reduced.
        self._added = False
        # The parameters whose changes in the backward pass are looked for; the one whose gradient
        # was removed before hvdlite's hook ran; and what has changed in them, in words.
        self._watched: list[Slot] = []
        self._without_gradient: Slot | None = None
        self._changed: str | None = None
        # GradScaler was told to make a step and has not made it yet; it may skip it.
        self.step_is_due = False

    # Called by the optimizer.

    def settle(self) -> None:
        """Ends the round of a backward that has raised, if other ranks wait for it; blocks then.

        Raises:
            RuntimeError: A backward is reducing gradients.
            HorovodInternalError: The reduction failed.
        """
        if self.round.is_open:
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
        if not self.round.is_open:
            if self._communicated and not self._has_unreduced and not self.has_added():
                return
            self.micro_batches.require_all(self._passes)
            self.gradients.rebuild_if_changed(self.round.number)
            self._open_round()
        try:
            self._finish_rounds()
        except BaseException:
            self._withdraw_grads(None)
            raise
        self._added = False

    def has_added(self) -> bool:
        """Whether the optimizer has new parameters since the gradients of this step were reduced:
        those of these may have come before, and are not. The same on all ranks."""
        return self._communicated and (self._added or not self.gradients.has_all())

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
        name = own_name(gradients.name, "loss", "the reduction of the closure's loss of {}")
        op = gradients.combining.op
        return loss_of_all(loss, name, op, gradients.process_set, self.weights.last)

    def next_step(self) -> None:
        """The gradients are used or zeroed: the next backward belongs to another step."""
        self.settle()
        if self.round.is_open:
            self._cancel_round()
        self.round.number += 1
        self.round.first_of_step = self.round.number
        self._communicated = False
        self._passes = 0
        self._has_unreduced = False
        self._backward, self.round.in_backward = None, False
        self._task = -1
        self._watched, self._changed = [], None
        self._added = False
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
        others = (rounds.gradients for rounds in alive if rounds is not self)
        reduced = {id(param) for gradients in others for param in gradients.params()}
        params = (param for group in self._groups() for param in group["params"])
        return [param for param in params if id(param) not in reduced]

    def set_passes_per_step(self, passes: int) -> None:
        self.micro_batches.require_passes(passes)
        self._passes_chosen = passes
        self._passes = 0

    def detach(self) -> None:
        """Removes the hooks; from now on the reducer does nothing."""
        self.gradients.detach()
        alive.discard(self)

    def release(self, params: Mapping[int, torch.Tensor]) -> None:
        """Stops reducing the gradients of these parameters. params: by their ids."""
        if not self.gradients.release(params):
            self.detach()

    def note_parameters(self) -> None:
        """The optimizer may have new parameters, and the next backward may reach only these."""
        if not self.round.is_open:
            generation = self.gradients.generation
            self.gradients.rebuild_if_changed(self.round.number)
            self._added |= self._communicated and self.gradients.generation != generation

    # Hooks.

    @uncompiled
    def _on_complete(self) -> None:
        """The hooks have brought all gradients of a bucket."""
        with self._lock:
            self._start_complete()

    @uncompiled
    def _on_gradient(self, slot: Slot, param: torch.Tensor) -> None:
        """Autograd has accumulated this parameter's gradient, and that needs more than a hook does
        by itself. Runs in a thread of autograd."""
        with self._lock:
            task = current_task()
            if task != self._task:
                self._begin_backward(task, slot)
            grad = param.grad
            if grad is None:
                self._without_gradient = slot
                return
            self.micro_batches.note(slot, grad, self.round.is_open)
            if self.weights.total is not None and slot.last_round != self.round.number:
                slot.weighed = [True] if slot.arrives_weighed else []
            slot.arrives_weighed = False
            if slot.last_round == self.round.number or self._is_reduced(slot, grad):
                error = self._reached_again(slot)
                if self.round.is_open and not self._has_started():
                    self._cancel_round()
                raise error
            if not self.round.is_open:
                slot.unreduced_round = self.round.number
                return
            backward_order = self.gradients.backward_order
            if backward_order is not None:
                backward_order.note(slot)
            bucket = slot.bucket
            if bucket is not None:
                self._copy_into_bucket(slot, grad)
            if bucket is None:
                slot.last_round = self.round.number
            elif slot.arrived():
                bucket.gather()
                self._start_complete()

    def _begin_backward(self, task: int, slot: Slot) -> None:
        """The slot's is the first gradient of a backward pass, or of one inside it (reentrant
        checkpoints)."""
        if self._backward is not None and self._backward.runs():
            self._task = task
            return
        self._forget_skipped_step()
        raised = self._backward is not None
        if self.round.is_open:
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
        self.gradients.rebuild_if_changed(self.round.number)
        self.micro_batches.begin(self._passes, slot, raised, self._communicated)
        self.weights.begin_pass(self.gradients.slots, adds_up=not self._communicates_next())
        self._task = task
        self._backward = BackwardPass(self._end_backward, self._withdraw_grads)
        program.backward_began(self._age)
        # A backward that raises does not count as a pass, but may leave gradients.
        self._has_unreduced = True
        if self._communicates_next():
            self._open_round()
        team = self.gradients.team
        has_others = team is not None and team.size > 1
        self._watched = self.gradients.slots if has_others else []
        self._without_gradient = None
        self.round.note_versions(self._watched)
        is_observed = self.round.is_open and self.gradients.backward_order is not None
        self.round.is_plain = not (
            is_observed or self.weights.total is not None or self.micro_batches.number
        )
        self.round.in_backward = True

    def look_for_changes(self) -> None:
        self.round.in_backward = False
        watched, self._watched = self._watched, []
        if watched:
            slot = self._without_gradient or self.round.changed(watched)
            self._changed = None if slot is None else changed_in_words(slot)

    def _ways_on(self) -> str:
        return "zero_grad()" if self.micro_batches.number else "step() or zero_grad()"

    @uncompiled
    def _end_backward(self) -> None:
        """All gradients of the backward are there."""
        if self._backward is None:
            # Another optimizer's end of the same backward has ended this round too.
            self._require_unchanged()
            return
        if not self.round.is_open:
            self.look_for_changes()
            self.micro_batches.end(self._passes)
        if self.communicates:
            self._passes += 1
        if self.round.is_open:
            try:
                self._finish_rounds(at_end=True)
            except HorovodInternalError:
                self._require_unchanged()  # ranks that train alone may have made it fail
                raise
        else:
            self._backward = None
            program.backward_ended(self._age, self.gradients.name)
        self._require_unchanged()

    def _require_unchanged(self) -> None:
        text, self._changed = self._changed, None
        if text is not None:
            raise RuntimeError(text)

    def _reached_again(self, slot: Slot) -> RuntimeError:
        if slot.last_round == self.round.number:
            return RuntimeError(
                f"the gradient of {slot.name!r} came twice in one reduction, because of reentrant "
                "checkpoints; pass use_reentrant=False to torch.utils.checkpoint.checkpoint"
            )
        self.micro_batches.require_first_round(slot)
        if self.passes_per_step > 1:
            return RuntimeError(
                f"backward() reached {slot.name!r}, whose gradient is already reduced in this "
                f"step: backward_passes_per_step={self.passes_per_step} reduces after every "
                f"{self.passes_per_step} backward passes that reach a parameter of this optimizer, "
                "and this one is one more before step(). Pass the number of all backward passes "
                "before a step (two losses of one network are two), or call step() and zero_grad() "
                "before; passes that should not count belong into no_sync()"
            )
        return RuntimeError(
            f"backward() reached {slot.name!r}, whose gradient is already reduced in this step. "
            "To accumulate gradients over several backward passes, pass backward_passes_per_step "
            "to DistributedOptimizer, or run all but the last inside no_sync(); to start over, "
            "call the optimizer's zero_grad()"
        )


def release(params: Iterable[torch.Tensor]) -> None:
    """Makes all existing optimizers stop reducing these parameters: they belong to the newest
    optimizer, and are reduced once. Blocks if they are on the way."""
    by_id = {id(param): param for param in params}
    on_the_way.wait_for(by_id.values())
    for rounds in list(alive):
        rounds.release(by_id)
