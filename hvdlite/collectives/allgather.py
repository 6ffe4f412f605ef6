"""allgather: every rank gets all ranks' rows, in the order of the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hvdlite import _core
from hvdlite.collectives.allreduce import allreduce
from hvdlite.collectives.devices import begin
from hvdlite.collectives.grouped_allreduce import grouped_allreduce
from hvdlite.collectives.groups import Group, backward_of, ending, parts_of, tensors_of
from hvdlite.collectives.handles import Handle, rows_of, synchronize, together
from hvdlite.collectives.posting import (
    checked,
    differentiable,
    label,
    named,
    no_rows,
    readable,
)
from hvdlite.ops import Average
from hvdlite.sites import site
from hvdlite.world.teams.process_sets import ProcessSet, global_process_set, team_of

_ALLGATHER = _core.ALLGATHER


def allgather(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Gathers the ranks' tensors, one after the other along the first dimension, on every rank.

    Every rank calls it. Blocks. Differentiable: the gradient is averaged over the ranks, and this
    rank's rows of it are taken.

    Args:
        tensor: At least one dimension. The first may differ between ranks (also be 0), the others
            and the dtype may not. Dtypes and devices are those of `allreduce`.
        name: As for `allreduce`.
        process_set: The ranks that take part.

    Returns:
        A new tensor of the same dtype and device, whose first dimension is the sum of all ranks'.

    Raises:
        ValueError: A bad argument, a scalar.
        HorovodInternalError: The ranks' operations do not match; on every rank, with the same text.

    Example:
        On rank 0 of 2; rank 1 has two rows:

        >>> hvd.allgather(torch.full((1 + hvd.rank(), 2), hvd.rank()))
        tensor([[0, 0],
                [1, 1],
                [1, 1]])
    """
    if differentiable(tensor):
        return _Allgather.apply(  # type: ignore[no-any-return,no-untyped-call]
            tensor, name, process_set
        )
    return synchronize(start("allgather", tensor, name, process_set, False))  # type: ignore[no-any-return]


def allgather_async(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Starts `allgather` and returns; `synchronize` gives the result. Not differentiable.

    Arguments, result and errors are those of `allgather`. The tensor must not change before the
    end.

    Example:
        On rank 0 of 2:

        >>> handle = hvd.allgather_async(torch.tensor([hvd.rank()]), name="ranks")
        >>> hvd.synchronize(handle)
        tensor([0, 1])
    """
    return start("allgather", tensor, name, process_set, True)


def grouped_allgather(
    tensors: Iterable[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """`allgather` of several tensors at once; the list of the results. Blocks. Differentiable.

    Every rank passes the same number of tensors, of the same dtypes and shapes except the first
    dimension.

    Raises:
        ValueError: A bad argument; then none is sent.
        HorovodInternalError: The ranks' groups do not match; on every rank, with the same text.

    Example:
        On rank 0 of 2:

        >>> rank = torch.tensor([hvd.rank()])
        >>> hvd.grouped_allgather([rank, 10 * rank], name="pair")
        [tensor([0, 1]), tensor([ 0, 10])]
    """
    tensors = tensors_of("grouped_allgather", tensors)
    if any(map(differentiable, tensors)):
        return list(_GroupedAllgather.apply(name, process_set, *tensors))  # type: ignore[no-untyped-call]
    handle, _ = _start_group(tensors, name, process_set, False)
    return synchronize(handle)  # type: ignore[no-any-return]


def grouped_allgather_async(
    tensors: Iterable[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Starts `grouped_allgather` and returns; `synchronize` gives the list. Not differentiable.

    Arguments and errors are those of `grouped_allgather`. The tensors must not change before the
    end.

    Example:
        On rank 0 of 2:

        >>> rank = torch.tensor([hvd.rank()])
        >>> handle = hvd.grouped_allgather_async([rank, 10 * rank])
        >>> hvd.synchronize(handle)
        [tensor([0, 1]), tensor([ 0, 10])]
    """
    handle, _ = _start_group(tensors, name, process_set, True)
    return handle


def start(
    form: str,
    tensor: torch.Tensor,
    name: str | None,
    process_set: ProcessSet,
    wake: bool,
    group: Group | None = None,
) -> Handle:
    """form: the function that the user called. group: the group it is part of, if any."""
    team = team_of(form, process_set)
    code = _checked(form, tensor)
    source = readable(tensor)
    name, unnamed = named(team, name)
    posting = _core.posting(
        _ALLGATHER, name, unnamed, code, source, None, group=group, site=site(3)
    )
    return begin(team, posting, wake)


def _start_group(
    tensors: Iterable[torch.Tensor], name: str | None, process_set: ProcessSet, wake: bool
) -> tuple[Handle, list[Handle]]:
    """The handle of the group, and the handles of its tensors."""
    form = "grouped_allgather"
    tensors = tensors_of(form, tensors)
    team = team_of(form, process_set)
    # All are checked before the first one is posted. The first dimensions may differ between ranks.
    layout = tuple([(_checked(form, tensor), tensor.shape[1:]) for tensor in tensors])
    parts = parts_of(team, "allgather", name, len(tensors), layout)
    handles = [
        start(form, tensor, part, process_set, wake, group)
        for tensor, (part, group) in zip(tensors, parts, strict=False)
    ]
    return together(handles, ending(team, "allgather", name, handles)), handles


def _checked(form: str, tensor: torch.Tensor) -> int:
    code = checked(form, tensor)
    if not tensor.dim():
        raise no_rows(form)
    return code


class _Allgather(torch.autograd.Function):
    """Backward: the gradient averaged over the ranks, then the rows that this rank contributed."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> Any:
        backward = f"{label('allgather', name, process_set)}.grad"
        handle = start("allgather", tensor, name, process_set, False)
        gathered = synchronize(handle)
        ctx.arguments = _own_rows(handle, process_set), backward, process_set
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        rows, name, process_set = ctx.arguments
        averaged = allreduce(grad, None, name, op=Average, process_set=process_set)
        # A copy, as a view would keep the memory of all ranks' rows.
        return averaged[rows].clone(), None, None


class _GroupedAllgather(torch.autograd.Function):
    """As `_Allgather`, for each tensor."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor) -> Any:
        backward = f"{label('grouped_allgather', name, process_set)}.grad"
        handle, handles = _start_group(tensors, name, process_set, False)
        gathered = synchronize(handle)
        rows = [_own_rows(handle, process_set) for handle in handles]
        ctx.arguments = rows, backward, process_set
        return tuple(gathered)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        every, name, process_set = ctx.arguments
        averaged = backward_of(
            grads,
            lambda some: grouped_allreduce(some, None, name, op=Average, process_set=process_set),
        )
        results = [
            None if grad is None else grad[rows].clone()
            for grad, rows in zip(averaged, every, strict=True)
        ]
        return None, None, *results


def _own_rows(handle: Handle, process_set: ProcessSet) -> slice:
    """This rank's rows in the result of an allgather that has ended."""
    rank = team_of("allgather", process_set).rank
    rows = rows_of(handle)
    begin = sum(rows[:rank])
    return slice(begin, begin + rows[rank])
