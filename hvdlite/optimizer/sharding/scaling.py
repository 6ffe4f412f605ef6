"""Shows GradScaler the gradients that this rank owns, with what all ranks have found in theirs.

A GradScaler goes through the `param_groups` of an optimizer, unscales what it finds as `.grad`, and
notes whether all of that is finite. With sharded gradients it finds this rank's parts there, and
one number more: 0, or infinity if some rank has a gradient that is not finite. So it decides on
every rank alike, by its own means.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch


def scaler_is_caller() -> bool:
    """Whether the caller of the calling function is a GradScaler that looks for gradients."""
    frame = sys._getframe(2)
    return frame.f_code.co_name == "_unscale_grads_"


def all_finite(grads: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """A tensor of one element: whether all these gradients are."""
    largest = [torch.linalg.vector_norm(grad.detach(), torch.inf) for grad in grads]
    if not largest:
        return torch.ones(1, dtype=torch.bool, device=device)
    found = torch.stack([norm.to(device, torch.float64) for norm in largest])
    return found.isfinite().all().reshape(1)


def groups_for_scaler(
    parts: Iterable[torch.Tensor],
    device: torch.device,
    largest_of_all: Callable[[torch.Tensor], torch.Tensor],
) -> list[dict[str, Any]]:
    """What a GradScaler is to go through instead of `param_groups`. Collective by
    `largest_of_all`.

    Args:
        parts: This rank's parts of parameters, with its parts of gradients as `.grad`.
        device: A device that the optimizer has parameters on.
        largest_of_all: Gives the maximum over all ranks of a float32 tensor of one element.
    """
    parts = [part for part in parts if part.grad is not None]
    is_finite = all_finite((part.grad for part in parts if part.grad is not None), device)
    found = largest_of_all((~is_finite).float())
    told = torch.zeros(1, device=device)
    told.grad = torch.where(found > 0, torch.inf, 0.0).to(device, torch.float32)
    return [{"params": [*parts, told]}]
