"""Rounds of which the backward passes have weights: when these are given and used.

What a weight does to a gradient: see `hvdlite.optimizer.weights`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from hvdlite.optimizer.buckets.slot import Slot
from hvdlite.optimizer.gradients import Gradients
from hvdlite.optimizer.rounds import Rounds
from hvdlite.optimizer.weights import weighed
from hvdlite.optimizer.weights_alone import WeightsAlone


class WeightedRounds(Rounds):
    """Rounds, and the weights of the backward passes that lead to them."""

    def __init__(self, gradients: Gradients) -> None:
        super().__init__(gradients)
        # The number of backward passes per round that the script has chosen.
        self._passes_chosen = 1
        # False inside no_sync().
        self.communicates = True
        # Reentrant, as a signal's handler may raise just before it is released.
        self._lock = threading.RLock()
        self._alone = WeightsAlone(self.weights, self._accumulates)

    @property
    def passes_per_step(self) -> int:
        """The number of backward passes per round."""
        return self.micro_batches.number or self._passes_chosen

    def set_weight(self, weight: float) -> None:
        """The weight of the backward passes that follow, until the step. See `Weights`.

        Raises:
            ValueError: Gradients of this weight could overflow.
            RuntimeError: It is too late for this step.
        """
        self.micro_batches.refuse("set_weight()", "every micro-batch counts alike; leave it out")
        self._forget_skipped_step()
        gradients = self.gradients
        too_late = self._too_late_for_weight()
        if too_late:
            raise RuntimeError(f"set_weight({weight:g}): {too_late}")
        if weight > 1 and gradients.travel_as(torch.float16):
            raise ValueError(
                f"set_weight({weight:g}): the gradients travel as float16, in which larger weights "
                "could overflow; give weights from 0 to 1, as fractions of the largest batch: "
                "set_weight(len(batch) / batch_size)"
            )
        self.weights.give(weight)
        if gradients.is_alone:
            self._alone.watch(self._params_alone())
        if self._accumulates():
            self.weigh_passes()

    def weigh_passes(self) -> None:
        """A backward pass follows that only accumulates, or that adds to another one's gradients:
        it is multiplied by its weight before."""
        if self.weights.given is not None:
            if not self.round.is_open:
                # There may be new parameters.
                self.gradients.rebuild_if_changed(self.round.number)
            self.weights.watch(self.gradients.slots, self._weighed)

    def require_reduced_weights(self) -> None:
        """Raises RuntimeError if `.grad` holds a sum with weights that was not reduced, and so
        was not divided by them."""
        if self.weights.total is not None:
            raise RuntimeError(
                "step() inside skip_synchronize() after backward passes with set_weight(), whose "
                "gradients are not reduced, and so not divided by the weights; call "
                "optimizer.synchronize() before, or leave out set_weight() in local steps"
            )

    def _forget_skipped_step(self) -> None:
        raise NotImplementedError

    def _params_alone(self) -> Sequence[torch.Tensor]:
        """On a rank outside the process set: the parameters whose gradients nobody reduces."""
        raise NotImplementedError

    def _accumulates(self) -> bool:
        """Whether the next backward pass, or the one that has begun, adds to the gradients of other
        passes, or others to its own."""
        return self.weights.total is not None or not self._communicates_next()

    def _communicates_next(self) -> bool:
        """Whether the next backward pass, or the one that has begun, ends with a round."""
        return self.communicates and self._passes + 1 >= self.passes_per_step

    def _weighed(self, slot: Slot, grad: torch.Tensor) -> torch.Tensor | None:
        """Before autograd accumulates a gradient: what it is to accumulate in its place, multiplied
        by the weight; None: the gradient is multiplied on its way to the bucket."""
        with self._lock:
            self._forget_skipped_step()
            weights = self.weights
            former = slot.param.grad
            # Whatever the script has made of it since the pass that left it there.
            adds = former is not None and weights.total is not None and bool(slot.weighed)
            given = weights.given
            slot.arrives_weighed = given is not None and (adds or not self._communicates_next())
            return weighed(grad, given) if given is not None and slot.arrives_weighed else None

    def _too_late_for_weight(self) -> str:
        """Why no weight can be given now; empty if it can."""
        if self.round.is_open and (
            self._has_started() or (self._backward and self._backward.runs())
        ):
            return (
                "called when the gradients of this step are on the way already; call it before "
                "backward()"
            )
        if not self._communicated and not self._has_unreduced:
            return ""
        for slot in self.gradients.slots:
            grad = slot.param.grad
            if (grad is not None or slot.is_sharded) and self._is_reduced(slot, grad):
                return (
                    "called when the gradients of this step are reduced already; call it before "
                    "backward(), and step() or the optimizer's zero_grad() after it"
                )
            if (
                self.weights.total is None
                and slot.unreduced_round == self.round.number
                and grad is not None
            ):
                return (
                    "called after a backward pass of this step that had no weight; call it before "
                    "each backward pass, or before the first one"
                )
        return ""
