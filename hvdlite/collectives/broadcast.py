"""broadcast: every rank gets the tensor of one of them."""

from __future__ import annotations

from typing import Any

import torch

from hvdlite import _core
from hvdlite.collectives.allreduce import allreduce
from hvdlite.collectives.devices import begin
from hvdlite.collectives.handles import Handle, synchronize
from hvdlite.collectives.posting import (
    buffers,
    checked,
    differentiable,
    label,
    named,
)
from hvdlite.ops import Average
from hvdlite.sites import site
from hvdlite.world.teams.process_sets import ProcessSet, as_int, global_process_set, team_of
from hvdlite.world.teams.team import Team

_BROADCAST = _core.BROADCAST


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Gives every rank the tensor of rank `root_rank`, as a new tensor. Blocks.

    Every rank passes a tensor of the same shape and dtype; only the root's values count.
    Differentiable: the gradient is averaged on the root, and zero elsewhere.

    Args:
        tensor: Any shape; dtypes and devices as for `allreduce`.
        root_rank: The root's rank in the world, also in a process set; it must be a member.
        name: As for `allreduce`.
        process_set: The ranks that take part.

    Returns:
        A contiguous tensor of the same shape, dtype and device.

    Raises:
        ValueError: A bad argument, no such rank.
        HorovodInternalError: The ranks' operations do not match; on every rank, with the same text.

    Example:
        On rank 0 of 2:

        >>> hvd.broadcast(torch.tensor([10 * hvd.rank()]), root_rank=1)
        tensor([10])
    """
    if differentiable(tensor):
        return _Broadcast.apply(  # type: ignore[no-any-return,no-untyped-call]
            tensor, root_rank, name, process_set
        )
    return synchronize(  # type: ignore[no-any-return]
        _start("broadcast", tensor, root_rank, name, process_set, False)
    )


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Starts `broadcast` and returns; `synchronize` gives the result. Not differentiable.

    Arguments, result and errors are those of `broadcast`. The tensor must not change before the
    end.

    Example:
        On rank 0 of 2:

        >>> handle = hvd.broadcast_async(torch.tensor([10 * hvd.rank()]), root_rank=1)
        >>> hvd.synchronize(handle)
        tensor([10])
    """
    return _start("broadcast", tensor, root_rank, name, process_set, True)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """`broadcast` in place: overwrites `tensor`, which is returned. Blocks. Not differentiable.

    Arguments are those of `broadcast`.

    Raises:
        ValueError: A bad argument; also where the tensor is not contiguous.
        HorovodInternalError: The ranks' operations do not match; on every rank, with the same text.

    Example:
        On rank 0 of 2:

        >>> tensor = torch.tensor([10 * hvd.rank()])
        >>> hvd.broadcast_(tensor, root_rank=1)
        tensor([10])
    """
    return synchronize(  # type: ignore[no-any-return]
        _start("broadcast_", tensor, root_rank, name, process_set, False)
    )


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Starts `broadcast_` and returns; `synchronize` gives the tensor with the root's values.

    Arguments and errors are those of `broadcast_`. The tensor must not be used before the end.

    Example:
        On rank 0 of 2:

        >>> tensor = torch.tensor([10 * hvd.rank()])
        >>> handle = hvd.broadcast_async_(tensor, root_rank=1)
        >>> hvd.synchronize(handle)
        tensor([10])
    """
    return _start("broadcast_", tensor, root_rank, name, process_set, True)


def _start(
    form: str,
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    wake: bool,
) -> Handle:
    """form: the function that the user called; in place if it ends in "_"."""
    team = team_of(form, process_set)
    code = checked(form, tensor)
    root = checked_root(form, root_rank, team, process_set)
    source, result = buffers(form, tensor)
    name, unnamed = named(team, name)
    posting = _core.posting(
        _BROADCAST, name, unnamed, code, source, result, root=root, site=site(3)
    )
    return begin(team, posting, wake)


def checked_root(form: str, root_rank: object, team: Team, process_set: ProcessSet) -> int:
    """The root's number in the team."""
    root = root_rank if type(root_rank) is int else as_int(root_rank)
    if root in team.ranks:
        return team.ranks.index(root)
    expected = (
        f"a rank from 0 to {team.size - 1}"
        if process_set is global_process_set
        else f"one of the members {list(team.ranks)}"
    )
    raise ValueError(f"{form}: root_rank={root_rank!r}, expected {expected}")


class _Broadcast(torch.autograd.Function):
    """Backward: averaged on the root, zeros elsewhere."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> Any:
        backward = f"{label('broadcast', name, process_set)}.grad"
        ctx.arguments = root_rank, backward, process_set
        return synchronize(_start("broadcast", tensor, root_rank, name, process_set, False))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        root_rank, name, process_set = ctx.arguments
        averaged = allreduce(grad, None, name, op=Average, process_set=process_set)
        team = team_of("broadcast", process_set)
        if team.ranks[team.rank] != root_rank:
            averaged = torch.zeros_like(averaged)
        return averaged, None, None, None
