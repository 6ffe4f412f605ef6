"""The collectives that wait for their result."""

from __future__ import annotations

import torch

from hvdlite import autograd
from hvdlite.collectives import (
    allgather_async,
    allreduce_async,
    allreduce_async_,
    barrier_async,
    broadcast_async,
    broadcast_async_,
    check_process_set,
    reduce_op,
    synchronize,
)
from hvdlite.compression import Compression, Compressor
from hvdlite.ops import ReduceOp
from hvdlite.process_sets import ProcessSet, global_process_set

_none = Compression.none


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
        tensor: Any shape, any dtype of `hvdlite.ops.DTYPES`, any device. Not changed. A
            non-contiguous one is copied.
        average: Deprecated, use `op`.
        name: By which the ranks' operations find each other, in any order. Without a name those of
            the same thread match in the order of the calls.
        compression: In which form floating-point tensors travel.
        op: Average (the default), Sum, Min, Max or Product.
        prescale_factor: Every rank's tensor is multiplied by this before it is combined.
        postscale_factor: The result is multiplied by this.
        process_set: The ranks that take part.

    Returns:
        A contiguous tensor of the same shape, dtype and device. The ranks' values are added in the
        order of the ranks within a host; float16 and bfloat16 are added in float32. Integers wrap;
        their Average divides the sum, toward zero.

    Raises:
        ValueError: A bad argument.
        HorovodInternalError: The ranks' operations do not match; on every rank, with the same text.
    """
    if average is not None or op.__class__ is not ReduceOp:
        op = reduce_op(average, op)
    assert op is not None
    if compression is not _none:
        tensor, ctx = compression.compress(tensor)
    if _differentiable(tensor):
        check_process_set("allreduce", process_set)
        result = autograd.Allreduce.apply(  # type: ignore[no-untyped-call]
            tensor, autograd.label(name), op, prescale_factor, postscale_factor
        )
    else:
        result = synchronize(
            allreduce_async(
                tensor, None, name, op, prescale_factor, postscale_factor, process_set, False
            )
        )
    if compression is not _none:
        result = compression.decompress(result, ctx)
    return result  # type: ignore[no-any-return]


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

    Not differentiable.

    Raises:
        ValueError: A bad argument; also where the tensor is not contiguous.
        HorovodInternalError: The ranks' operations do not match. The tensor's contents are then
            undefined.
    """
    return synchronize(  # type: ignore[return-value]
        allreduce_async_(
            tensor, average, name, op, prescale_factor, postscale_factor, process_set, False
        )
    )


def allgather(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The ranks' tensors, one after the other along the first dimension, on every rank. Blocks.

    Differentiable: the gradient is averaged over the ranks, and this rank's rows of it are taken.

    Args:
        tensor: At least one dimension. The first may differ between ranks (also be 0), the others
            and the dtype may not.
        name: As for `allreduce`.
        process_set: The ranks that take part.

    Raises:
        ValueError: A bad argument, a scalar.
        HorovodInternalError: The ranks' operations do not match; on every rank, with the same text.
    """
    if _differentiable(tensor):
        check_process_set("allgather", process_set)
        return autograd.Allgather.apply(tensor, autograd.label(name))  # type: ignore[no-any-return,no-untyped-call]
    return synchronize(allgather_async(tensor, name, process_set, False))  # type: ignore[return-value]


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The tensor of rank `root_rank`, on every rank, as a new tensor. Blocks.

    Every rank passes a tensor of the same shape and dtype; only the root's values count.
    Differentiable: the gradient is averaged on the root, and zero elsewhere.

    Raises:
        ValueError: A bad argument, no such rank.
        HorovodInternalError: The ranks' operations do not match; on every rank, with the same text.
    """
    if _differentiable(tensor):
        check_process_set("broadcast", process_set)
        return autograd.Broadcast.apply(  # type: ignore[no-any-return,no-untyped-call]
            tensor, root_rank, autograd.label(name)
        )
    return synchronize(  # type: ignore[return-value]
        broadcast_async(tensor, root_rank, name, process_set, False)
    )


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """`broadcast` in place: overwrites `tensor`, which is returned. Blocks. Not differentiable.

    Raises:
        ValueError: A bad argument; also where the tensor is not contiguous.
        HorovodInternalError: The ranks' operations do not match; on every rank, with the same text.
    """
    return synchronize(  # type: ignore[return-value]
        broadcast_async_(tensor, root_rank, name, process_set, False)
    )


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank has called it, whatever else is still pending. Blocks.

    Raises:
        HorovodInternalError: A rank has left the world.
    """
    check_process_set("barrier", process_set)
    synchronize(barrier_async(_wake=False))


def _differentiable(tensor: torch.Tensor) -> bool:
    """Whether autograd records the operation. (What is no tensor is refused further on.)"""
    return isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled()
