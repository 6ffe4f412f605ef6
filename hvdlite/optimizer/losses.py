"""Combines the losses that closures return, as an optimizer that reads the loss must see the same
value on all ranks."""

from __future__ import annotations

import numbers
from typing import Any

import torch

from hvdlite.collectives import allreduce_
from hvdlite.ops import Average, ReduceOp, Sum
from hvdlite.world.teams.process_sets import ProcessSet


def loss_of_all(
    loss: Any, name: str, op: ReduceOp, process_set: ProcessSet, weight: float | None = None
) -> Any:
    """The losses that the ranks' closures have returned, combined like their gradients. Collective;
    blocks.

    A loss that is not a number counts as zero, as a missing gradient does. A rank whose closure
    returned None gets the loss of the others; anything else that is not a number is returned as is.

    Args:
        loss: A tensor of one element, a number of Python's or numpy's, or None.
        name: The same on every rank.
        op: Average or Sum.
        weight: What this rank's gradients have counted with, if they have weights: so does its
            loss.

    Returns:
        The same value on every rank: a detached tensor like the rank's own, or a number of the
        same type, but a float if that is a whole number.
    """
    own = _number(loss)
    # A one beside the loss tells a loss of zero from no loss. Then the weight.
    own_weight = 1.0 if weight is None else weight
    weighed = 0.0 if own is None or not own_weight else own * own_weight
    sums = torch.tensor(
        [weighed, float(own is not None), own_weight], dtype=torch.float64, device="cpu"
    )
    allreduce_(sums, name=name, op=Sum if op is Sum else Average, process_set=process_set)
    value, present, weights = sums.tolist()
    if weight is not None and weights:
        value /= weights
    if not present or (own is None and loss is not None):
        return loss
    if isinstance(loss, torch.Tensor):
        dtype = loss.dtype if loss.is_floating_point() else torch.float64
        return torch.full_like(loss.detach(), value, dtype=dtype, requires_grad=False)
    is_whole = own is None or isinstance(loss, numbers.Rational)
    return value if is_whole else type(loss)(value)


def _number(loss: Any) -> float | None:
    if isinstance(loss, torch.Tensor):
        return float(loss.detach()) if loss.numel() == 1 and not loss.is_complex() else None
    is_number = not isinstance(loss, bool) and isinstance(loss, numbers.Real)
    return float(loss) if is_number else None
