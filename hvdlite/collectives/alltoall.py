"""alltoall: every rank sends some of its rows to each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdlite import _core
from hvdlite.collectives.calls import Call, Ended, Gradient, Memory
from hvdlite.collectives.handles import Handle, rows_of, synchronize
from hvdlite.collectives.posting import checked
from hvdlite.world.teams.process_sets import ProcessSet, as_int, global_process_set
from hvdlite.world.teams.team import Team

_INT32_MAX = torch.iinfo(torch.int32).max

Splits = torch.Tensor | Sequence[int] | None


class Alltoall(Call):
    kind = _core.ALLTOALL
    has_rows = True

    def memory(self, team: Team, tensor: torch.Tensor) -> Memory:
        rows = _rows_to_send(tensor, self.own, team)
        self.splits = torch.tensor(rows, dtype=torch.int64, device="cpu")
        return super().memory(team, tensor)

    def handle(self, started: Handle) -> Handle:
        return Handle(
            started.operation,
            finish=lambda: (synchronize(started), _like(self.own, rows_of(started))),
        )

    def gradient(self, form: str, name: str, ended: Ended) -> Gradient:
        """The rows go back, with the received splits as splits."""
        ((operation, tensor),) = ended
        received, num_rows = operation.rows(), len(tensor)

        def padded(result: Any, _: int) -> torch.Tensor:
            back: torch.Tensor = result[0]
            # No rank was sent the last rows.
            rest = back.new_zeros((num_rows - len(back), *back.shape[1:]))
            return torch.cat((back, rest)) if len(rest) else back

        return Gradient(
            Alltoall("alltoall", name, self.process_set, own=received), from_result=padded
        )


def alltoall(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Sends rows to each member, and returns those received, in the order of the members. Blocks.

    Differentiable: the gradient's rows go back to their senders; rows that were sent to no rank get
    zeros.

    Args:
        tensor: At least one dimension; the dtype and all dimensions but the first are the same on
            every rank.
        splits: The number of rows for each member, the first rows for the first: as many numbers as
            there are members, not negative, with a sum of at most the first dimension. A list, or a
            tensor of int32 or int64 on any device. None: the same number for each; the first
            dimension is then a multiple of the number of members.
        name: As for `allreduce`.
        process_set: The ranks that take part.

    Returns:
        Without splits the received rows. With splits a pair: the received rows, and how many came
        from each member, with the dtype and on the device of `splits`, or as int32 on the CPU if
        that is no tensor.

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
    result: Any = Alltoall("alltoall", name, process_set, own=splits).run(tensor)
    return result[0] if splits is None else result  # type: ignore[no-any-return]


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
    return Alltoall("alltoall", name, process_set, own=splits).start(tensor)


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
