"""When the weights of backward passes are given and used. What a weight does to a gradient: see
`hvdlite.optimizer.weights`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from hvdlite.optimizer.buckets.slot import Slot
from hvdlite.optimizer.together import alive
from hvdlite.optimizer.weights import weighed

if TYPE_CHECKING:
    from hvdlite.optimizer.reducer import Reducer


def set_weight(reducer: Reducer, weight: float) -> None:
    """The weight of the backward passes that follow, until the step. See `Weights`.

    Raises:
        ValueError: Gradients of this weight could overflow.
        RuntimeError: It is too late for this step.
    """
    reducer.micro_batches.refuse("set_weight()", "every micro-batch counts alike; leave it out")
    reducer.forget_skipped_step()
    gradients = reducer.gradients
    if too_late := _too_late(reducer):
        raise RuntimeError(f"set_weight({weight:g}): {too_late}")
    if weight > 1 and gradients.travel_as(torch.float16):
        raise ValueError(
            f"set_weight({weight:g}): the gradients travel as float16, in which larger weights "
            "could overflow; give weights from 0 to 1, as fractions of the largest batch: "
            "set_weight(len(batch) / batch_size)"
        )
    reducer.weights.give(weight)
    if gradients.is_alone:
        reduced = {id(p) for each in alive if each is not reducer for p in each.gradients.params()}
        params = (param for group in reducer.groups() for param in group["params"])
        reducer.alone.watch(param for param in params if id(param) not in reduced)
    if reducer.accumulates():
        weigh_passes(reducer)


def weigh_passes(reducer: Reducer) -> None:
    """A backward pass follows that only accumulates, or that adds to another one's gradients: it is
    multiplied by its weight before."""
    if reducer.weights.given is not None:
        if reducer.round is None:
            # There may be new parameters.
            reducer.gradients.rebuild_if_changed()
        reducer.weights.watch(reducer.gradients.slots, partial(_weighed, reducer))


def require_reduced_weights(reducer: Reducer) -> None:
    """Raises RuntimeError if `.grad` holds a sum with weights that was not reduced, and so was not
    divided by them."""
    if reducer.weights.total is not None:
        raise RuntimeError(
            "step() inside skip_synchronize() after backward passes with set_weight(), whose "
            "gradients are not reduced, and so not divided by the weights; call "
            "optimizer.synchronize() before, or leave out set_weight() in local steps"
        )


def _weighed(reducer: Reducer, slot: Slot, grad: torch.Tensor) -> torch.Tensor | None:
    """Before autograd accumulates a gradient: what it is to accumulate in its place, multiplied by
    the weight; None: the gradient is multiplied on its way to the bucket."""
    with reducer.lock:
        reducer.forget_skipped_step()
        weights = reducer.weights
        former = slot.param.grad
        # Whatever the script has made of it since the pass that left it there.
        adds = former is not None and weights.total is not None and bool(slot.weighed)
        given = weights.given
        slot.arrives_weighed = given is not None and (adds or not reducer.communicates_next())
        return weighed(grad, given) if given is not None and slot.arrives_weighed else None


def _too_late(reducer: Reducer) -> str:
    """Why no weight can be given now; empty if it can."""
    if reducer.round is not None and (reducer.round.has_started() or reducer.in_backward()):
        return "the gradients of this step are in flight already; call it before backward()"
    if not reducer.step.communicated and not reducer.step.has_unreduced:
        return ""
    for slot in reducer.gradients.slots:
        grad = slot.param.grad
        if (grad is not None or slot.is_sharded) and slot.is_reduced(grad):
            return (
                "the gradients of this step are reduced already; call it before backward(), and "
                "step() or the optimizer's zero_grad() after it"
            )
        if reducer.weights.total is None and slot.is_left_over() and grad is not None:
            return (
                "a backward pass of this step had no weight; call it before each backward pass, or "
                "before the first one"
            )
    return ""
