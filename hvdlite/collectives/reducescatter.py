"""reducescatter: the ranks' tensors are combined, and every rank gets some rows of the result."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hvdlite import _core
from hvdlite.collectives.allgather import Allgather
from hvdlite.collectives.calls import Call, Ended, Gradient, Memory
from hvdlite.collectives.handles import Handle
from hvdlite.collectives.posting import readable, require_sum
from hvdlite.compression import Compression, Compressor
from hvdlite.ops import Average, ReduceOp, Sum
from hvdlite.world.teams.process_sets import ProcessSet, global_process_set, team_of
from hvdlite.world.teams.team import Team


class Reducescatter(Call):
    kind = _core.REDUCESCATTER
    has_rows = True

    def check(self, team: Team, tensor: torch.Tensor) -> int:
        require_sum(self.form, self.op)
        return super().check(team, tensor)

    def memory(self, team: Team, tensor: torch.Tensor) -> Memory:
        rows, more = divmod(tensor.shape[0], team.size)
        shape = (rows + (team.rank < more), *tensor.shape[1:])
        return readable(tensor), torch.empty(shape, dtype=tensor.dtype, device=tensor.device)

    def gradient(self, form: str, name: str, ended: Ended) -> Gradient:
        """Times the factors, and with Sum the number of members, as Horovod's; then gathered."""
        size = team_of(self.form, self.process_set).size if self.op is Sum else 1
        scale = size * float(self.prescale) * float(self.postscale)
        call = Allgather(f"{form}allgather", name, self.process_set)
        return Gradient(call, to_send=lambda grad: grad * scale)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Combines the members' tensors and returns this member's rows of the result. Blocks.

    Every member calls it. The rows are split along the first dimension in the order of the members,
    as evenly as possible: the first `rows % size` members get one more than the others, which may
    get none. Differentiable: the gradient is multiplied by the factors, with Sum also by the number
    of members, and gathered.

    Args:
        tensor: At least one dimension; shape and dtype are the same on every rank. Dtypes and
            devices are those of `allreduce`. Not changed.
        name: As for `allreduce`.
        compression: As for `allreduce`.
        op: `Average` or `Sum`.
        process_set: The ranks that take part.
        prescale_factor: Multiplies every rank's tensor before it is combined, as in `allreduce`.
        postscale_factor: Multiplies the result, as in `allreduce`.

    Returns:
        A contiguous tensor of the same dtype and device, with this member's rows.

    Raises:
        ValueError: A bad argument, a scalar, another op.
        HorovodInternalError: The ranks' operations do not match; on every rank, with the same text.

    Example:
        On rank 0 of 2, which gets two of the three rows:

        >>> hvd.reducescatter(torch.tensor([1.0, 2.0, 3.0]), op=hvd.Sum)
        tensor([2., 4.])
    """
    how = op, prescale_factor, postscale_factor
    return Reducescatter("reducescatter", name, process_set, how).run(tensor, compression)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Starts `reducescatter` and returns; `synchronize` gives this member's rows.

    Arguments and errors are those of `reducescatter`, without `compression`. The tensor must not
    change before the end. Not differentiable.

    Example:
        On rank 0 of 2:

        >>> handle = hvd.reducescatter_async(torch.tensor([1.0, 2.0, 3.0]), op=hvd.Sum)
        >>> hvd.synchronize(handle)
        tensor([2., 4.])
    """
    how = op, prescale_factor, postscale_factor
    return Reducescatter("reducescatter", name, process_set, how).start(tensor)


def grouped_reducescatter(
    tensors: Iterable[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """`reducescatter` of several tensors at once; the list of the results. Blocks. Differentiable.

    Every rank passes the same number of tensors, of the same shapes and dtypes. The other arguments
    are those of `reducescatter`.

    Raises:
        ValueError: A bad argument; then nothing is sent.
        HorovodInternalError: The ranks' groups do not match; on every rank, with the same text.

    Example:
        On rank 0 of 2:

        >>> hvd.grouped_reducescatter([torch.ones(2), torch.ones(3)], op=hvd.Sum)
        [tensor([2.]), tensor([2., 2.])]
    """
    how = op, prescale_factor, postscale_factor
    return Reducescatter("grouped_reducescatter", name, process_set, how).run_group(
        tensors, compression
    )


def grouped_reducescatter_async(
    tensors: Iterable[torch.Tensor],
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Starts `grouped_reducescatter` and returns; `synchronize` gives the list of the results.

    Arguments and errors are those of `grouped_reducescatter`, without `compression`. The group is
    one operation to `poll` and `synchronize`. The tensors must not change before the end. Not
    differentiable.

    Example:
        On rank 0 of 2:

        >>> handle = hvd.grouped_reducescatter_async([torch.ones(2), torch.ones(3)], op=hvd.Sum)
        >>> hvd.synchronize(handle)
        [tensor([2.]), tensor([2., 2.])]
    """
    how = op, prescale_factor, postscale_factor
    return Reducescatter("grouped_reducescatter", name, process_set, how).start_group(tensors)
