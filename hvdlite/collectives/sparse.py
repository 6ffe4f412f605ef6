"""sparse_allreduce_async: the sum of sparse tensors is all their elements together."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from hvdlite.collectives.allgather import Allgather
from hvdlite.collectives.handles import Handle, synchronize
from hvdlite.collectives.posting import checked, require_sum
from hvdlite.ops import Average, ReduceOp
from hvdlite.world.teams.process_sets import ProcessSet, global_process_set, team_of
from hvdlite.world.teams.team import Team


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None,
    op: ReduceOp,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Starts the sum or the average of sparse tensors, and returns a function for the result.

    Every rank passes a tensor of the same shape, dtype and number of sparse dimensions; the number
    of elements may differ, and be 0.

    Args:
        tensor: A sparse COO tensor, coalesced or not, on any device. Not changed, but it must not
            change before the end.
        name: As for `allreduce`.
        op: Sum or Average.
        process_set: The ranks that take part.

    Returns:
        A function without arguments. It waits, and returns a sparse tensor of the input's shape,
        dtype and device, the same one each time; it raises like `synchronize`. The tensor is not
        coalesced: it holds the elements of all members one after the other, and an index that comes
        several times stands for their sum. float16 and bfloat16 are coalesced, added in float32
        and rounded once, and so is an average of integers, which divides the sums, toward zero.

    Raises:
        ValueError: A bad argument, a tensor that is not sparse, another op.

    Example:
        On rank 0 of 2:

        >>> tensor = torch.eye(3)[hvd.rank()].to_sparse()
        >>> wait = hvd.sparse_allreduce_async(tensor, name="rows", op=hvd.Sum)
        >>> wait().to_dense()
        tensor([1., 1., 0.])
    """
    form = "sparse_allreduce_async"
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        what = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ValueError(f"{form}: got {what}, expected a torch.sparse_coo tensor")
    require_sum(form, op)
    team = team_of(form, process_set)
    return functools.partial(synchronize, start(form, name, team, op, tensor))


def start(form: str, name: str | None, team: Team, op: ReduceOp, tensor: torch.Tensor) -> Handle:
    """`sparse_allreduce_async` of any team, called by `form`."""
    tensor = tensor.detach()
    values, indices = tensor._values(), tensor._indices()
    code = checked(form, values, op)
    checked(form, indices)
    # One row for each element.
    rows = indices.t().contiguous()
    # Two allgathers, but those of ranks with other shapes or ops must not match.
    layout = (code, int(op), tensor.shape, tensor.sparse_dim())
    call = Allgather(form, name, global_process_set)
    gathered = call.post_group(team, (rows, values), layout, True)
    shape, divisor = tensor.shape, team.size if op is Average else 1

    def finish() -> torch.Tensor:
        rows, values = synchronize(gathered)
        return _combined(rows, values, shape, divisor)

    return Handle(gathered.operation, finish=finish)


def _combined(
    rows: torch.Tensor, values: torch.Tensor, shape: torch.Size, divisor: int
) -> torch.Tensor:
    """The sparse tensor of all ranks' elements, divided: floats are multiplied by 1 / divisor, as
    the core's kernels do."""
    dtype = values.dtype
    narrow = dtype in (torch.float16, torch.bfloat16)
    exact = not dtype.is_floating_point
    needs_sums = narrow or (exact and divisor > 1)
    if divisor > 1 and not needs_sums:
        values = values * (1 / divisor)  # not in place: this is done again if it is interrupted
    total = torch.sparse_coo_tensor(
        rows.t(), values.float() if narrow else values, shape, check_invariants=False
    )
    if not needs_sums:
        return total
    total = total.coalesce()
    sums = total.values()
    means = torch.div(sums, divisor, rounding_mode="trunc") if exact else sums * (1 / divisor)
    return torch.sparse_coo_tensor(
        total.indices(), means.to(dtype), shape, is_coalesced=True, check_invariants=False
    )
