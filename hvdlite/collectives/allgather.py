"""allgather: every rank gets all ranks' rows, in the order of the ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hvdlite import _core
from hvdlite.collectives.calls import Call, Ended, Gradient
from hvdlite.collectives.grouped_allreduce import GroupedAllreduce
from hvdlite.collectives.handles import Handle
from hvdlite.ops import Average
from hvdlite.world.teams.process_sets import ProcessSet, global_process_set, team_of


class Allgather(Call):
    kind = _core.ALLGATHER
    has_rows = True

    def layout(self, tensor: torch.Tensor) -> tuple[int, ...]:
        return tensor.shape[1:]  # the first dimensions may differ between ranks

    def gradient(self, form: str, name: str, ended: Ended) -> Gradient:
        """Averaged over the ranks; then the rows that this rank has contributed."""
        rank = team_of(self.form, self.process_set).rank
        ends = [sum(operation.rows()[: rank + 1]) for operation, _ in ended]
        begins = [end - len(tensor) for end, (_, tensor) in zip(ends, ended, strict=True)]
        return Gradient(
            GroupedAllreduce(f"{form}allreduce", name, self.process_set, (Average, 1.0, 1.0)),
            # A copy, as a view would keep the memory of all ranks' rows.
            from_result=lambda result, i: result[begins[i] : ends[i]].clone(),
        )


def allgather(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Gathers the ranks' tensors, one after the other along the first dimension, on every rank.

    Every rank calls it. Blocks. Differentiable: the gradient is averaged over the ranks, and each
    rank gets its own rows of it.

    Args:
        tensor: At least one dimension. The first may differ between ranks (also be 0); the others
            and the dtype must not. Dtypes and devices are those of `allreduce`.
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
    return Allgather("allgather", name, process_set).run(tensor)


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
    return Allgather("allgather", name, process_set).start(tensor)


def grouped_allgather(
    tensors: Iterable[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """`allgather` of several tensors at once; the list of the results. Blocks. Differentiable.

    Every rank passes the same number of tensors, of the same dtypes and shapes except the first
    dimension.

    Raises:
        ValueError: A bad argument; then nothing is sent.
        HorovodInternalError: The ranks' groups do not match; on every rank, with the same text.

    Example:
        On rank 0 of 2:

        >>> rank = torch.tensor([hvd.rank()])
        >>> hvd.grouped_allgather([rank, 10 * rank], name="pair")
        [tensor([0, 1]), tensor([ 0, 10])]
    """
    return Allgather("grouped_allgather", name, process_set).run_group(tensors)


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
    return Allgather("grouped_allgather", name, process_set).start_group(tensors)
