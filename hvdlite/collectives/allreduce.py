"""allreduce: every rank gets the combination of all ranks' tensors."""

from __future__ import annotations

from typing import Any

import torch

from hvdlite import _core
from hvdlite.collectives.devices import begin
from hvdlite.collectives.groups import Group
from hvdlite.collectives.handles import Handle, synchronize
from hvdlite.collectives.posting import (
    buffers,
    checked,
    checked_compression,
    differentiable,
    factors,
    label,
    named,
    reduce_op,
)
from hvdlite.compression import Compression, Compressor
from hvdlite.errors import HorovodInternalError
from hvdlite.observe import waits
from hvdlite.ops import ReduceOp
from hvdlite.sites import site
from hvdlite.world.teams.process_sets import ProcessSet, global_process_set, team_of
from hvdlite.world.telling import last_line

_ALLREDUCE = _core.ALLREDUCE
_posting = _core.posting
_BOOL = _core.BOOL
_none = Compression.none
_Tensor = torch.Tensor


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Combines the ranks' tensors; every rank gets the same result, bitwise, in a new tensor.

    Every rank calls it with a tensor of the same shape and dtype. Blocks until the result is there.
    Differentiable: the gradient is allreduced with the same op and factors.

    Args:
        tensor: Any shape, on any device; uint8, int8, int16, int32, int64, float16, bfloat16,
            float32, float64 or bool. Not changed. A non-contiguous one is copied.
        average: Deprecated, use `op`.
        name: The ranks' operations match by kind and name, in any order. Without a name those of
            the same thread match in the order of the calls.
        compression: How floating-point tensors travel: `Compression.none`, `Compression.fp16` or
            `Compression.bf16`.
        op: `Average` (the default), `Sum`, `Min`, `Max`, `Product` or `Adasum`.
        prescale_factor: Every rank's tensor is multiplied by this before it is combined, as torch's
            `factor * tensor`: float16 and bfloat16 in float32, and not rounded before the end;
            integers in float64, cut toward zero.
        postscale_factor: The result is multiplied by this, likewise; of Average, the sum by
            this / size.
        process_set: The ranks that take part.

    Returns:
        A contiguous tensor of the same shape, dtype and device. The ranks' values are added in the
        order of the ranks within a host; float16 and bfloat16 are added in float32. Integers wrap;
        their Average divides the sum, toward zero.

    Raises:
        ValueError: A bad argument, before anything is sent.
        HorovodInternalError: The ranks' operations do not match; on every rank, with the same text.

    Example:
        On rank 0 of 2:

        >>> hvd.allreduce(torch.tensor([1.0, 2.0]) * (hvd.rank() + 1), op=hvd.Sum)
        tensor([3., 6.])
    """
    if compression is not _none:
        checked_compression("allreduce", compression)
        checked("allreduce", tensor)
        tensor, ctx = compression.compress(tensor)
    result = None
    if differentiable(tensor):
        result = _Allreduce.apply(  # type: ignore[no-untyped-call]
            tensor,
            name,
            reduce_op(average, op),
            prescale_factor,
            postscale_factor,
            process_set,
        )
    elif (
        average is None
        and op.__class__ is ReduceOp
        and tensor.__class__ is _Tensor
        and tensor.is_cpu
        and not waits.observed()
    ):
        result = _fast(tensor, name, op, prescale_factor, postscale_factor, process_set)
    if result is None:
        result = synchronize(
            start(
                "allreduce",
                tensor,
                average,
                name,
                op,
                prescale_factor,
                postscale_factor,
                process_set,
                False,
            )
        )
    if compression is not _none:
        result = compression.decompress(result, ctx)
    return result


def _fast(
    tensor: torch.Tensor,
    name: str | None,
    op: ReduceOp | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> torch.Tensor | None:
    """`allreduce` in one call of the core. None: nothing was done, and it takes another way."""
    team = team_of("allreduce", process_set)
    result = torch.empty_like(tensor)
    outcome = team.run_allreduce(
        tensor,
        result,
        team.unnamed if name is None else name,
        op,
        prescale,
        postscale,
        -1.0,
        site(3),
        last_line.due,
    )
    if outcome is None:
        return result
    if outcome is not NotImplemented:
        raise HorovodInternalError(outcome)
    return None


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Starts `allreduce` and returns; `synchronize` gives the result.

    Arguments, result and errors are those of `allreduce`; what the ranks disagree about is raised
    by `synchronize`. The input must not change before the end. Not differentiable.

    Example:
        On rank 0 of 2:

        >>> handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="ones")
        >>> hvd.synchronize(handle)
        tensor([2., 2.])
    """
    return start(
        "allreduce",
        tensor,
        average,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        True,
    )


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """`allreduce` in place: the result overwrites `tensor`, which is returned. Blocks.

    Arguments are those of `allreduce`, without `compression`. Not differentiable.

    Raises:
        ValueError: A bad argument; also where the tensor is not contiguous.
        HorovodInternalError: The ranks' operations do not match. The tensor's contents are then
            undefined.

    Example:
        On rank 0 of 2:

        >>> tensor = torch.full((2,), float(hvd.rank()))
        >>> hvd.allreduce_(tensor, name="mean") is tensor
        True
        >>> tensor
        tensor([0.5000, 0.5000])
    """
    if average is None and op.__class__ is ReduceOp and not waits.observed():
        # The fast path: one call of the core, which refuses all but ordinary arguments. One with a
        # name has no site, which would cost a fifth of its time.
        team = team_of("allreduce_", process_set)
        outcome = team.run_allreduce(
            tensor,
            None,
            team.unnamed if name is None else name,
            op,
            prescale_factor,
            postscale_factor,
            -1.0,
            site(2) if name is None else "",
            last_line.due,
        )
        if outcome is None:
            return tensor
        if outcome is not NotImplemented:
            raise HorovodInternalError(outcome)
    return synchronize(  # type: ignore[no-any-return]
        start(
            "allreduce_",
            tensor,
            average,
            name,
            op,
            prescale_factor,
            postscale_factor,
            process_set,
            False,
        )
    )


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Starts `allreduce_` and returns; `synchronize` gives the tensor with the result in it.

    Arguments and errors are those of `allreduce_`. The tensor must not be used before the end.

    Example:
        On rank 0 of 2:

        >>> tensor = torch.ones(2)
        >>> handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name="ones")
        >>> hvd.synchronize(handle)
        tensor([2., 2.])
    """
    return start(
        "allreduce_",
        tensor,
        average,
        name,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        True,
    )


def start(
    form: str,
    tensor: torch.Tensor,
    average: bool | None,
    name: str | None,
    op: ReduceOp | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    wake: bool,
    group: Group | None = None,
) -> Handle:
    """form: the function that the user called; in place if it ends in "_". group: the group it is
    part of, if any."""
    if average is not None or op.__class__ is not ReduceOp:
        op = reduce_op(average, op)
    team = team_of(form, process_set)
    code = checked(form, tensor, op)
    if prescale.__class__ is not float or postscale.__class__ is not float or code == _BOOL:
        prescale, postscale = factors(form, code, prescale, postscale)
    source, result = buffers(form, tensor)
    name, unnamed = named(team, name)
    # Positional arguments, for speed: most allreduces pass here.
    posting = _posting(
        _ALLREDUCE,
        name,
        unnamed,
        code,
        source,
        result,
        op,
        0,
        prescale,
        postscale,
        None,
        group,
        0,
        site(3),
    )
    return begin(team, posting, wake)


class _Allreduce(torch.autograd.Function):
    """Forward and backward are the same allreduce, with the same op and factors."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        name: str | None,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
    ) -> Any:
        backward = f"{label('allreduce', name, process_set)}.grad"
        ctx.arguments = (backward, _none, op, prescale, postscale, process_set)
        return synchronize(
            start("allreduce", tensor, None, name, op, prescale, postscale, process_set, False)
        )

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        name, *rest = ctx.arguments
        return allreduce(grad, None, name, *rest), None, None, None, None, None
