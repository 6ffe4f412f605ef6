"""alltoall: every rank sends some of its rows to each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdlite import _core
from hvdlite.collectives.devices import begin
from hvdlite.collectives.handles import Handle, rows_of, synchronize
from hvdlite.collectives.posting import (
    checked,
    differentiable,
    label,
    named,
    no_rows,
    readable,
)
from hvdlite.sites import site
from hvdlite.world.teams.process_sets import ProcessSet, as_int, global_process_set, team_of
from hvdlite.world.teams.team import Team

_ALLTOALL = _core.ALLTOALL
_INT32_MAX = torch.iinfo(torch.int32).max

Splits = torch.Tensor | Sequence[int] | None


def alltoall(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sends rows to each member, and returns those received, in the order of the members. Blocks.

    Differentiable: the gradient's rows go back to where the rows came from; rows that were sent to
    nobody get zeros.

    Args:
        tensor: At least one dimension; the dtype and all dimensions but the first are the same on
            every rank.
        splits: How many rows go to each member, the first ones to the first: as many numbers as
            there are members, not negative, with a sum of at most the first dimension. A list, or
            a tensor of int32 or int64 on any device. None: the same number for each; the first
            dimension is then a multiple of the number of members.
        name: As for `allreduce`.
        process_set: The ranks that take part.

    Returns:
        Without splits the received rows. With splits a pair of the received rows and of how many
        came from each member; the latter with the dtype and on the device of `splits`, int32 on the
        CPU if that is no tensor.

    Raises:
        ValueError: A bad argument, a scalar, splits that do not fit.
        HorovodInternalError: The ranks' operations do not match; on every rank, with the same text.

    Example:
        On rank 0 of 2; each rank sends its first row to rank 0, its second one to rank 1:

        >>> hvd.alltoall(torch.tensor([[1, 1], [2, 2]]) + 10 * hvd.rank())
        tensor([[ 1,  1],
                [11, 11]])

        And with splits, one row to rank 0 and two to rank 1:

        >>> hvd.alltoall(torch.tensor([0, 1, 2]), splits=[1, 2])
        (tensor([0, 0]), tensor([1, 1], dtype=torch.int32))
    """
    if differentiable(tensor):
        rows, counts = _Alltoall.apply(  # type: ignore[no-untyped-call]
            tensor, splits, name, process_set
        )
    else:
        rows, counts = synchronize(_start(tensor, splits, name, process_set, False))
    return rows if splits is None else (rows, counts)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Starts `alltoall` and returns; `synchronize` gives the pair, also without splits.

    Arguments and errors are those of `alltoall`. The tensor must not change before the end. Not
    differentiable.

    Example:
        On rank 0 of 2:

        >>> handle = hvd.alltoall_async(torch.tensor([1, 2]) + 10 * hvd.rank())
        >>> hvd.synchronize(handle)
        (tensor([ 1, 11]), tensor([1, 1], dtype=torch.int32))
    """
    return _start(tensor, splits, name, process_set, True)


def _start(
    tensor: torch.Tensor, splits: Splits, name: str | None, process_set: ProcessSet, wake: bool
) -> Handle:
    team = team_of("alltoall", process_set)
    code = checked("alltoall", tensor)
    if not tensor.dim():
        raise no_rows("alltoall")
    rows = torch.tensor(_rows_to_send(tensor, splits, team), dtype=torch.int64, device="cpu")
    source = readable(tensor)
    name, unnamed = named(team, name)
    posting = _core.posting(_ALLTOALL, name, unnamed, code, source, None, splits=rows, site=site(3))
    handle = begin(team, posting, wake)
    return Handle(
        handle.operation, finish=lambda: (synchronize(handle), _like(splits, rows_of(handle)))
    )


def _rows_to_send(tensor: torch.Tensor, splits: Splits, team: Team) -> list[int]:
    """How many rows go to each member.

    Raises:
        ValueError: The splits are not row counts, or do not fit the tensor.
    """
    num_rows, size = tensor.shape[0], team.size
    if splits is None:
        if num_rows % size:
            raise ValueError(
                f"alltoall: the first dimension is {num_rows}, not a multiple of the {size} "
                "members; pass splits to say how many rows go to each"
            )
        return [num_rows // size] * size
    if isinstance(splits, torch.Tensor):
        if splits.dtype not in (torch.int32, torch.int64) or splits.dim() != 1:
            raise ValueError(
                f"alltoall: splits is {str(splits.dtype).removeprefix('torch.')}"
                f"{list(splits.shape)}, expected int32[{size}] or int64[{size}]"
            )
        checked("alltoall: splits", splits)
        numbers: list[Any] = splits.tolist()
    else:
        try:
            numbers = list(splits)
        except TypeError:
            raise ValueError(
                f"alltoall: splits={splits!r}, expected a tensor or a list of {size} integers"
            ) from None
    rows = [as_int(number) for number in numbers]
    if len(rows) != size or any(number is None or number < 0 for number in rows):
        raise ValueError(
            f"alltoall: splits={numbers}, expected {size} row counts, one for each member, none "
            "negative"
        )
    wanted = [number for number in rows if number is not None]
    if sum(wanted) > num_rows:
        raise ValueError(
            f"alltoall: splits={numbers} add up to {sum(wanted)} rows, but the tensor has only "
            f"{num_rows}"
        )
    return wanted


def _like(splits: Splits, counts: tuple[int, ...]) -> torch.Tensor:
    """The received splits, in the form of the splits that the user passed."""
    if isinstance(splits, torch.Tensor):
        return torch.tensor(counts, dtype=splits.dtype, device=splits.device)
    dtype = torch.int32 if max(counts) <= _INT32_MAX else torch.int64
    return torch.tensor(counts, dtype=dtype, device="cpu")


class _Alltoall(torch.autograd.Function):
    """Backward: sends the rows back, with the received splits as splits."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Splits, name: str | None, process_set: ProcessSet
    ) -> Any:
        backward = f"{label('alltoall', name, process_set)}.grad"
        handle = _start(tensor, splits, name, process_set, False)
        rows, counts = synchronize(handle)
        ctx.mark_non_differentiable(counts)
        ctx.arguments = rows_of(handle), backward, process_set
        ctx.num_rows = len(tensor)
        return rows, counts

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
        back, _ = alltoall(grad, *ctx.arguments)
        if len(back) < ctx.num_rows:  # the last rows were sent to nobody
            rest = back.new_zeros((ctx.num_rows - len(back), *back.shape[1:]))
            back = torch.cat((back, rest))
        return back, None, None, None
