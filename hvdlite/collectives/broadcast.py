"""broadcast: every rank gets the tensor of one of them."""

from __future__ import annotations

import torch

from hvdlite import _core
from hvdlite.collectives.allreduce import Allreduce
from hvdlite.collectives.calls import Call, Ended, Gradient, Memory
from hvdlite.collectives.handles import Handle
from hvdlite.ops import Average
from hvdlite.world.teams.process_sets import ProcessSet, as_int, global_process_set, team_of
from hvdlite.world.teams.team import Team


class Broadcast(Call):
    kind = _core.BROADCAST

    def memory(self, team: Team, tensor: torch.Tensor) -> Memory:
        self.root = checked_root(self.form, self.own, team, self.process_set)
        return self.same_shape(team, tensor)

    def gradient(self, form: str, name: str, ended: Ended) -> Gradient:
        """Averaged on the root, zeros elsewhere."""
        is_root = team_of(self.form, self.process_set).rank == self.root
        return Gradient(
            Allreduce(f"{form}allreduce", name, self.process_set, (Average, 1.0, 1.0)),
            from_result=lambda result, _: result if is_root else torch.zeros_like(result),
        )


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
    return Broadcast("broadcast", name, process_set, own=root_rank).run(tensor)


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
    return Broadcast("broadcast", name, process_set, own=root_rank).start(tensor)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """`broadcast` in place: overwrites `tensor`, which is returned. Blocks. Not differentiable.

    Arguments are those of `broadcast`.

    Raises:
        ValueError: A bad argument, or a tensor that is not contiguous.
        HorovodInternalError: The ranks' operations do not match; on every rank, with the same text.

    Example:
        On rank 0 of 2:

        >>> tensor = torch.tensor([10 * hvd.rank()])
        >>> hvd.broadcast_(tensor, root_rank=1)
        tensor([10])
    """
    return Broadcast("broadcast_", name, process_set, own=root_rank).run(tensor)


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
    return Broadcast("broadcast_", name, process_set, own=root_rank).start(tensor)


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
