"""allreduce: every rank gets the combination of all ranks' tensors."""

from __future__ import annotations

import math

import torch

from hvdlite import _core
from hvdlite.collectives.calls import Call, Ended, Gradient
from hvdlite.collectives.handles import Handle
from hvdlite.collectives.posting import differentiable, reduce_op
from hvdlite.compression import Compression, Compressor
from hvdlite.errors import HorovodInternalError
from hvdlite.observe import waits
from hvdlite.ops import Average, ReduceOp
from hvdlite.sites import site
from hvdlite.world.teams.process_sets import ProcessSet, global_process_set, team_of
from hvdlite.world.telling import last_line


class Allreduce(Call):
    kind = _core.ALLREDUCE
    memory = Call.same_shape

    def gradient(self, form: str, name: str, ended: Ended) -> Gradient:
        """The same allreduce, with the same op and factors."""
        how = self.op, self.prescale, self.postscale
        return Gradient(type(self)(self.form, name, self.process_set, how))


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
        prescale_factor: Multiplies every rank's tensor before it is combined, as torch's
            `factor * tensor`: float16 and bfloat16 in float32, rounded only at the end; integers in
            float64, truncated toward zero.
        postscale_factor: Multiplies the result, likewise; with Average, the sum is multiplied by
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
    if op is None and average is None:
        op = Average
    if (
        average is None
        and op.__class__ is ReduceOp
        and compression is Compression.none
        and _core.dtype_of(tensor) >= 0
        and not differentiable(tensor)
        and not waits.observed()
    ):
        result = torch.empty_like(tensor)
        at = site(2)
        if _at_once(tensor, result, name, op, prescale_factor, postscale_factor, process_set, at):
            return result
    how = reduce_op(average, op), prescale_factor, postscale_factor
    return Allreduce("allreduce", name, process_set, how).run(tensor, compression)


def _at_once(
    tensor: torch.Tensor,
    result: torch.Tensor | None,
    name: str | None,
    op: ReduceOp | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    place: str,
) -> bool:
    """In one call of the core. False: nothing was done, as it takes ordinary arguments only."""
    team = team_of("allreduce" if result is not None else "allreduce_", process_set)
    called = team.unnamed if name is None else name
    given = tensor, result, called, op, prescale, postscale, -1.0, place
    failure = team.run_allreduce(*given, last_line.due)
    if failure is NotImplemented and last_line.clock() >= last_line.due:
        # Now, and here: reports of where the ranks are put those together that wait in one line.
        last_line.note()
        failure = team.run_allreduce(*given, math.inf)
    if failure is not None and failure is not NotImplemented:
        raise HorovodInternalError(failure)
    return failure is None


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

    Arguments, result and errors are those of `allreduce`; if the ranks disagree, `synchronize`
    raises the error. The input must not change before the end. Not differentiable.

    Example:
        On rank 0 of 2:

        >>> handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name="ones")
        >>> hvd.synchronize(handle)
        tensor([2., 2.])
    """
    how = reduce_op(average, op), prescale_factor, postscale_factor
    return Allreduce("allreduce", name, process_set, how).start(tensor)


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
        ValueError: A bad argument, or a tensor that is not contiguous.
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
        # One with a name has no site, which would cost a fifth of its time.
        place = site(2) if name is None else ""
        if _at_once(tensor, None, name, op, prescale_factor, postscale_factor, process_set, place):
            return tensor
    how = reduce_op(average, op), prescale_factor, postscale_factor
    return Allreduce("allreduce_", name, process_set, how).run(tensor)


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
    how = reduce_op(average, op), prescale_factor, postscale_factor
    return Allreduce("allreduce_", name, process_set, how).start(tensor)
