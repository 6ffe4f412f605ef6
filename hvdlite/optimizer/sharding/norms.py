"""The norm of gradients of which each rank has parts, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch


def rows_of_norms(grads: Iterable[tuple[int, torch.Tensor]], norm_type: float) -> torch.Tensor:
    """For each (parameter's number, part of its gradient) a row of the number and the part's norm;
    in host memory, float64."""
    indices, norms = [], []
    for index, grad in grads:
        # In float32 at least: the norm of a parameter is rounded once, when its parts are together.
        dtype = torch.promote_types(grad.dtype, torch.float32)
        indices.append(index)
        norms.append(torch.linalg.vector_norm(grad.detach(), norm_type, dtype=dtype).double())
    rows = torch.empty(len(indices), 2, dtype=torch.float64, device="cpu")
    if norms:
        rows[:, 0] = torch.tensor(indices, dtype=torch.float64, device="cpu")
        rows[:, 1] = torch.stack([norm.to(norms[0].device) for norm in norms]).cpu()
    return rows


def total_norm(
    rows: torch.Tensor, params: Sequence[torch.Tensor], norm_type: float
) -> torch.Tensor:
    """The norm of all gradients, as torch computes it: the norm of the parameters' norms, each in
    its gradient's precision.

    rows: what `rows_of_norms` has given on all owners, one after the other. The same rows give the
    same bits.

    A parameter that one rank has whole has the very norm that torch computes. For one in parts, the
    p-th powers of the parts' norms are added in float64, which is at least as exact: the result may
    differ from torch's, which adds in float32, in the last digits of a float32.
    """
    ordered = sorted(rows.tolist(), key=lambda row: row[0])
    norms: list[torch.Tensor] = []
    for index, group in groupby(ordered, key=lambda row: row[0]):
        parts = torch.tensor([norm for _, norm in group], dtype=torch.float64, device="cpu")
        if len(parts) == 1:
            norm = parts[0]
        elif norm_type == 0:
            norm = parts.sum()  # each is the number of elements other than zero
        else:
            norm = torch.linalg.vector_norm(parts, norm_type)
        norms.append(norm.to(params[int(index)].dtype.to_real()))
    if not norms:
        return torch.tensor(0.0)
    device = params[int(ordered[0][0])].device
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms).to(device), norm_type)
    return total


def scale_to(max_norm: float, total: torch.Tensor, grads: Iterable[torch.Tensor]) -> None:
    """Multiplies gradients in place by what brings the norm of all, `total`, down to `max_norm`."""
    # The formula of torch.nn.utils.clip_grad_norm_.
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(factor.to(grad.device))
