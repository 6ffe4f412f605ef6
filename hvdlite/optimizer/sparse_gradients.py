"""Sparse gradients: the ranks gather and add the rows that they have, not the whole tensor.

Every rank takes part, with no rows if it has no gradient. Before its rows a rank sends numbers that
say what it contributes, and at which position; so all ranks know this of all ranks.

With sparse_as_dense the whole tensor is reduced instead, in a bucket, followed by a one for each
row that this rank has: the result has a row if any rank has it, even one of zeros.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

import torch

from hvdlite.collectives.host_gather import HostGather
from hvdlite.compression import Compressor
from hvdlite.errors import HorovodInternalError
from hvdlite.ops import Average
from hvdlite.optimizer.buckets import weight_codes
from hvdlite.optimizer.buckets.bucket import Combining
from hvdlite.optimizer.buckets.positions import Position
from hvdlite.optimizer.buckets.slot import Slot
from hvdlite.world.teams.team import Team

# How many numbers a rank sends before its rows: contribution, the four of its position, and the
# bits of its weight.
_HEAD = 6


class Contribution(enum.IntEnum):
    """What a rank contributes to one gradient."""

    NOTHING = 0
    ROWS = 1
    # A dense one, which it sends as rows.
    ALL_ROWS = 2
    # A dense one, which its bucket has reduced in this round.
    REDUCED = 3


def contribution_of(grad: torch.Tensor | None) -> Contribution:
    """The contribution of a rank that has this gradient, and no place in a bucket for it."""
    if grad is None:
        return Contribution.NOTHING
    return Contribution.ROWS if grad.is_sparse else Contribution.ALL_ROWS


class RowExchange:
    """The exchange of one parameter's rows: every rank makes it, posts it, which does not block,
    and finishes it. The ranks' exchanges match by `label`."""

    def __init__(
        self,
        label: str,
        param: torch.Tensor,
        what: Contribution,
        grad: torch.Tensor | None,
        combining: Combining,
        team: Team,
        position: Position,
    ) -> None:
        """param: gives shape, dtype and device. what: this rank's contribution. grad: the gradient,
        if it is sent. position: this rank's position."""
        self._param = param
        op, self._prescale, postscale = combining.factors(team.size)
        self._postscale = postscale / (team.size if op is Average else 1)
        indices, values = _rows(
            param, grad if what in (Contribution.ROWS, Contribution.ALL_ROWS) else None
        )
        compressor: type[Compressor] = combining.compression
        self._is_weighted = position.weight is not None
        weight = torch.tensor([position.weight or 0.0], dtype=torch.float64, device="cpu")
        head = torch.tensor([what, *position.numbers()], dtype=torch.int64, device="cpu")
        head = torch.cat([head, weight.view(torch.int64)])
        values = values.to(compressor.travels_as(values.dtype))
        self._rows = HostGather(team, f"{label}.rows", torch.cat([head, indices]))
        self._values = HostGather(team, f"{label}.values", values.contiguous())

    def post(self) -> None:
        """Posts what it has not posted yet."""
        self._rows.post()
        self._values.post()

    def positions(self) -> list[tuple[int, ...]]:
        """After `finish`: the numbers of each rank's position, by rank."""
        return [tuple(part[1 : _HEAD - 1].tolist()) for part in self._heads()]

    def finish(self) -> tuple[torch.Tensor | None, frozenset[Contribution]]:
        """The reduced gradient, sparse and coalesced, or None if no rank has one; and the ranks'
        contributions. Both are the same on all ranks. Blocks; may be called again.

        Rows are added in the order of the ranks, 16-bit numbers in float32.

        Raises:
            HorovodInternalError: The exchange failed; on every rank.
        """
        for gather in (self._rows, self._values):
            failure = gather.wait()
            if failure is not None:
                raise HorovodInternalError(failure)
        parts, values = self._heads(), self._values.result()
        contributions = frozenset(Contribution(int(part[0])) for part in parts)
        if contributions == {Contribution.NOTHING}:
            return None, contributions
        param = self._param
        real_dtype = (param.real if param.is_complex() else param).dtype
        # Like the core's kernels: 16-bit numbers are widened before they are multiplied.
        values = values.to(torch.float32 if real_dtype.itemsize == 2 else real_dtype)
        if self._prescale != 1.0:
            values = values * self._prescale
        indices, summed = _added([part[_HEAD:] for part in parts], values)
        postscale = self._postscale
        if self._is_weighted:
            weights = torch.stack([part[_HEAD - 1] for part in parts]).view(torch.float64)
            postscale *= weight_codes.quotient(len(parts), math.fsum(weights.tolist()))
        if postscale != 1.0:
            summed = summed * postscale
        summed = summed.to(real_dtype)
        if param.is_complex():
            summed = torch.view_as_complex(summed)
        reduced = _coo(indices.to(param.device), summed.to(param.device), param.shape)
        return reduced, contributions

    def _heads(self) -> Sequence[torch.Tensor]:
        """By rank: its contribution, its position, and the indices of its rows."""
        return torch.split(self._rows.result(), list(self._rows.rows()))


def put_rows(slot: Slot, grad: torch.Tensor) -> bool:
    """Fills the place of a gradient whose result is sparse. Returns whether `grad` is sparse."""
    assert slot.view is not None
    assert slot.rows is not None
    if not grad.is_sparse:
        slot.view.copy_(grad.detach())
        slot.rows.fill_(1)
        return False
    grad = _by_rows(grad)
    indices = grad.indices()[0]
    slot.view.zero_()[indices] = grad.values()
    slot.rows.zero_()[indices] = 1
    return True


def rows_in(slot: Slot) -> torch.Tensor:
    """The reduced gradient in its place, sparse and coalesced: the rows that any rank has."""
    assert slot.view is not None
    assert slot.rows is not None
    indices = slot.rows.nonzero().flatten()
    return _coo(indices, slot.view[indices], slot.param.shape)


def _rows(param: torch.Tensor, grad: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices of a gradient's rows and the rows, in host memory; complex numbers as pairs."""
    indices, values = torch.arange(0), param.new_empty((0, *param.shape[1:]))
    if grad is not None:
        grad = _by_rows(grad)
        indices, values = grad.indices()[0], grad.values()
    indices, values = indices.cpu(), values.cpu()
    return indices, torch.view_as_real(values) if values.is_complex() else values


def _added(
    parts: Sequence[torch.Tensor], values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """All indices, sorted, and for each the sum of its rows, added in the order of `parts`.

    parts: the indices of each rank, each at most once; values: all their rows. (coalesce() adds
    equal indices in any order.)
    """
    indices, places = torch.unique(torch.cat(list(parts)), return_inverse=True)
    total = values.new_zeros((len(indices), *values.shape[1:]))
    sizes = [len(part) for part in parts]
    for at, rows in zip(torch.split(places, sizes), torch.split(values, sizes), strict=True):
        total[at] += rows
    return indices, total


def _by_rows(grad: torch.Tensor) -> torch.Tensor:
    """The gradient as a tensor that is sparse in its first dimension only, each row once."""
    grad = grad.detach()
    if not grad.is_sparse:
        grad = grad.to_sparse(1)
    elif grad.sparse_dim() != 1:
        grad = grad.to_dense().to_sparse(1)
    return grad.coalesce()


def _coo(indices: torch.Tensor, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The sparse tensor with these rows, sorted; `values` may have a dimension more, of pairs."""
    size = (shape[0], *values.shape[1:])
    return torch.sparse_coo_tensor(
        indices[None], values, size, check_invariants=False, is_coalesced=True
    )
