"""The result of an operation with scale factors: torch's own `factor * tensor`, computed in the
dtype's type for arithmetic, and rounded only at the end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Whose results are rounded to 16 bits: where a host's sum is sent to others, and at the end.
_NARROW = (torch.float16, torch.bfloat16)


def widened(x: Tensor) -> Tensor:
    return x.float() if x.dtype in _NARROW else x


def times(factor: float, x: Tensor) -> Tensor:
    """Integers: in float64, cut toward zero."""
    if factor == 1.0:
        return x
    if x.is_floating_point():
        return factor * x
    return (factor * x.double()).long().to(x.dtype)


def _combined(op: str, parts: Sequence[Tensor]) -> Tensor:
    """In the order in which they are given; of zeros of both signs the last is taken."""
    result = parts[0]
    for part in parts[1:]:
        if op in ("Min", "Max"):
            first = (result < part) if op == "Min" else (result > part)
            result = torch.where(first | (result != result), result, part)
        else:
            result = result * part if op == "Product" else result + part
    return result


def finished(total: Tensor, dtype: torch.dtype, op: str, postscale: float, size: int) -> Tensor:
    """What becomes of the sum, which is as `widened` has it: 1/n and the factor are one."""
    if op != "Average":
        return times(postscale, total).to(dtype)
    if dtype.is_floating_point:
        return times(postscale / size, total).to(dtype)
    return times(postscale, torch.div(total, size, rounding_mode="trunc")).to(dtype)


def reduced(
    hosts: Sequence[Sequence[Tensor]], op: str, prescale: float, postscale: float, size: int
) -> Tensor:
    """hosts: by host, what its ranks give, but for those that have joined; at most two hosts, as
    more are added in an order that depends on the algorithm. size: of the whole world."""
    dtype = next(x.dtype for given in hosts for x in given)
    sums = [_combined(op, [times(prescale, widened(x)) for x in given]) for given in hosts if given]
    if len(hosts) > 1:
        sums = [widened(total.to(dtype)) for total in sums]
    return finished(_combined(op, sums), dtype, op, postscale, size)


def differ(got: Tensor, wanted: Tensor) -> str:
    """Where the bits differ, whichever NaN there is; empty if they don't."""
    if got.dtype != wanted.dtype or got.shape != wanted.shape:
        return f"{got.dtype}{list(got.shape)}, not {wanted.dtype}{list(wanted.shape)}"
    same = (got == wanted) & (got.signbit() == wanted.signbit()) | (got != got) & (wanted != wanted)
    if same.all():
        return ""
    at = int((~same).flatten().nonzero()[0])
    pair = got.flatten()[at].item(), wanted.flatten()[at].item()
    return f"{int((~same).sum())} of {got.numel()} differ, [{at}] is {pair[0]}, not {pair[1]}"
