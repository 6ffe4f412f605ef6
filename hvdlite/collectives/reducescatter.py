"""reducescatter: the ranks' tensors are combined, and every rank gets some rows of the result."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hvdlite import _core
from hvdlite.collectives.allgather import allgather, grouped_allgather
from hvdlite.collectives.devices import begin
from hvdlite.collectives.groups import Group, backward_of, ending, parts_of, tensors_of
from hvdlite.collectives.handles import Handle, synchronize, together
from hvdlite.collectives.posting import (
    checked,
    checked_compression,
    differentiable,
    factors,
    label,
    named,
    no_rows,
    readable,
    require_sum,
)
from hvdlite.compression import Compression, Compressor
from hvdlite.ops import Average, ReduceOp, Sum
from hvdlite.sites import site
from hvdlite.world.teams.process_sets import ProcessSet, global_process_set, team_of

_REDUCESCATTER = _core.REDUCESCATTER
_BOOL = _core.BOOL
_none = Compression.none


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

    Every member calls it. The rows are dealt out along the first dimension in the order of the
    members, as evenly as can be: the first `rows % size` members get one more than the others,
    which may get none. Differentiable: the gradient times the factors, and with Sum times the
    number of members, is gathered.

    Args:
        tensor: At least one dimension; shape and dtype are the same on every rank. Dtypes and
            devices are those of `allreduce`. Not changed.
        name: As for `allreduce`.
        compression: As for `allreduce`.
        op: `Average` or `Sum`.
        process_set: The ranks that take part.
        prescale_factor: Every rank's tensor is multiplied by this before it is combined, as in
            `allreduce`.
        postscale_factor: The result is multiplied by this, as in `allreduce`.

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
    if compression is not _none:
        checked_compression("reducescatter", compression)
        checked("reducescatter", tensor)
        tensor, ctx = compression.compress(tensor)
    if differentiable(tensor):
        result = _Reducescatter.apply(  # type: ignore[no-untyped-call]
            tensor,
            name,
            op,
            process_set,
            prescale_factor,
            postscale_factor,
        )
    else:
        result = synchronize(
            _start(
                "reducescatter",
                tensor,
                name,
                op,
                process_set,
                prescale_factor,
                postscale_factor,
                False,
            )
        )
    if compression is not _none:
        result = compression.decompress(result, ctx)
    return result  # type: ignore[no-any-return]


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
    return _start(
        "reducescatter", tensor, name, op, process_set, prescale_factor, postscale_factor, True
    )


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
    form = "grouped_reducescatter"
    tensors = tensors_of(form, tensors)
    if compression is not _none:
        checked_compression(form, compression)
        for tensor in tensors:
            checked(form, tensor)
        pairs = [compression.compress(tensor) for tensor in tensors]
        tensors = [tensor for tensor, _ in pairs]
    arguments = op, process_set, prescale_factor, postscale_factor
    if any(map(differentiable, tensors)):
        results = _GroupedReducescatter.apply(  # type: ignore[no-untyped-call]
            name, *arguments, *tensors
        )
    else:
        results = synchronize(_start_group(tensors, name, *arguments, False))
    if compression is not _none:
        results = [
            compression.decompress(result, ctx)
            for result, (_, ctx) in zip(results, pairs, strict=True)
        ]
    return list(results)


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
    return _start_group(tensors, name, op, process_set, prescale_factor, postscale_factor, True)


def _start(
    form: str,
    tensor: torch.Tensor,
    name: str | None,
    op: ReduceOp,
    process_set: ProcessSet,
    prescale: float,
    postscale: float,
    wake: bool,
    group: Group | None = None,
) -> Handle:
    """form: the function that the user called. group: the group it is part of, if any."""
    team = team_of(form, process_set)
    code = _checked(form, tensor, op)
    if prescale.__class__ is not float or postscale.__class__ is not float or code == _BOOL:
        prescale, postscale = factors(form, code, prescale, postscale)
    source = readable(tensor)
    rows, more = divmod(tensor.shape[0], team.size)
    shape = (rows + (team.rank < more), *tensor.shape[1:])
    result = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    name, unnamed = named(team, name)
    posting = _core.posting(
        *(_REDUCESCATTER, name, unnamed, code, source, result, op),
        prescale=prescale,
        postscale=postscale,
        group=group,
        site=site(3),
    )
    return begin(team, posting, wake)


def _start_group(
    given: Iterable[torch.Tensor],
    name: str | None,
    op: ReduceOp,
    process_set: ProcessSet,
    prescale: float,
    postscale: float,
    wake: bool,
) -> Handle:
    form = "grouped_reducescatter"
    tensors = tensors_of(form, given)
    team = team_of(form, process_set)
    # All are checked before the first one is posted.
    layout = tuple([(_checked(form, tensor, op), tensor.shape) for tensor in tensors])
    for code, _ in layout:
        prescale, postscale = factors(form, code, prescale, postscale)
    parts = parts_of(team, "reducescatter", name, len(tensors), layout)
    handles = [
        _start(form, tensor, part, op, process_set, prescale, postscale, wake, group)
        for tensor, (part, group) in zip(tensors, parts, strict=False)
    ]
    return together(handles, ending(team, "reducescatter", name, handles))


def _checked(form: str, tensor: torch.Tensor, op: ReduceOp) -> int:
    require_sum(form, op)
    code = checked(form, tensor, op)
    if not tensor.dim():
        raise no_rows(form)
    return code


class _Reducescatter(torch.autograd.Function):
    """Backward: the gradient times the factors (Horovod's, see `_scale`), gathered."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        name: str | None,
        op: ReduceOp,
        process_set: ProcessSet,
        prescale: float,
        postscale: float,
    ) -> Any:
        arguments = op, process_set, prescale, postscale
        backward = f"{label('reducescatter', name, process_set)}.grad"
        result = synchronize(_start("reducescatter", tensor, name, *arguments, False))
        ctx.arguments = _scale(*arguments), backward, process_set
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        scale, name, process_set = ctx.arguments
        return allgather(grad * scale, name, process_set), None, None, None, None, None


class _GroupedReducescatter(torch.autograd.Function):
    """As `_Reducescatter`, for each tensor."""

    @staticmethod
    def forward(ctx: Any, name: str | None, *rest: Any) -> Any:
        op, process_set, prescale, postscale, *tensors = rest
        arguments = op, process_set, prescale, postscale
        backward = f"{label('grouped_reducescatter', name, process_set)}.grad"
        results = synchronize(_start_group(tensors, name, *arguments, False))
        ctx.arguments = _scale(*arguments), backward, process_set
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        scale, name, process_set = ctx.arguments
        gathered = backward_of(
            grads,
            lambda some: grouped_allgather([grad * scale for grad in some], name, process_set),
        )
        return None, None, None, None, None, *gathered


def _scale(op: ReduceOp, process_set: ProcessSet, prescale: float, postscale: float) -> float:
    """The factor of the gradient."""
    size = team_of("reducescatter", process_set).size if op is Sum else 1
    return size * float(prescale) * float(postscale)
