"""The collectives that return at once, and waiting for them: validate, post to the engine, wait.

The forms that wait (`hvdlite.blocking`) are made of these: what a call costs in Python is here.
They pass `_wake=False`: who waits at once drives the engine itself, and the progress thread sleeps.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable

import torch
from torch.utils.dlpack import from_dlpack

from hvdlite import _core, gpu, world
from hvdlite.errors import HorovodInternalError, NotInitializedError
from hvdlite.ops import DTYPES, Average, ReduceOp, Sum
from hvdlite.process_sets import ProcessSet, global_process_set

_ALLREDUCE = _core.ALLREDUCE
_BROADCAST = _core.BROADCAST
_ALLGATHER = _core.ALLGATHER
_BARRIER = _core.BARRIER
_BOOL = _core.BOOL
_UINT8 = _core.UINT8
_NO_SHAPE = torch.Size([0])


class Handle:
    """A collective that was started: for `poll` and `synchronize`, and nothing else.

    The engine keeps the tensors until the operation has ended, also where the handle is dropped.
    """

    __slots__ = ("_finish", "_operation", "_result")

    def __init__(
        self,
        operation: _core.Operation,
        result: torch.Tensor | None,
        finish: Callable[[_core.Operation], torch.Tensor] | None = None,
    ) -> None:
        self._operation = operation
        self._result = result
        # Makes the result from the operation that has ended; None where it is there already.
        self._finish = finish


def poll(handle: Handle) -> bool:
    """Whether the operation has ended, so that `synchronize` would return at once. Never blocks.

    Raises:
        ValueError: `handle` was not returned by an asynchronous operation.
    """
    if handle.__class__ is not Handle:
        raise _not_a_handle(handle)
    return handle._operation.poll()


def synchronize(handle: Handle) -> torch.Tensor | None:
    """Waits for an asynchronous operation, and returns its result (the same one each time).

    Raises:
        HorovodInternalError: The operation failed, on every rank that takes part.
        ValueError: `handle` was not returned by an asynchronous operation.
    """
    if handle.__class__ is not Handle:
        raise _not_a_handle(handle)
    failure = handle._operation.wait()
    if failure is not None:
        raise HorovodInternalError(failure)
    if handle._finish is not None:
        handle._result = handle._finish(handle._operation)
        handle._finish = None
    return handle._result


class Unnamed(str):
    """A name that `World.unnamed` gave, where it is passed on instead of None."""

    __slots__ = ()


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    _wake: bool = True,
) -> Handle:
    """Starts `allreduce` and returns; `synchronize` gives the result.

    Arguments, result and errors as those of `allreduce`; the input must not change before the end.
    Not differentiable.
    """
    if average is not None or op.__class__ is not ReduceOp:
        op = reduce_op(average, op)
    code = _checked("allreduce", tensor, op, process_set)
    if not tensor.is_contiguous() or not tensor.is_cpu or tensor.is_neg():
        # A copy of the input's own, which is then the result's memory too.
        source = output = _host_copy(tensor)
        finish = _to_device(output, tensor)
    else:
        source = tensor
        output = torch.empty_like(tensor)
        finish = None
    operation = _post(
        _wake,
        _ALLREDUCE,
        name,
        code,
        op,
        0,
        source.data_ptr(),
        output.data_ptr(),
        tensor.shape,
        prescale_factor,
        postscale_factor,
        (source, output),
    )
    return Handle(operation, output, finish)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    _wake: bool = True,
) -> Handle:
    """Starts `allreduce_` and returns; `synchronize` gives the tensor with the result in it.

    The tensor must not be used before the end.
    """
    if average is not None or op.__class__ is not ReduceOp:
        op = reduce_op(average, op)
    code = _checked("allreduce_", tensor, op, process_set)
    place, finish = _in_place("allreduce_", tensor)
    address = place.data_ptr()
    operation = _post(
        _wake,
        _ALLREDUCE,
        name,
        code,
        op,
        0,
        address,
        address,
        tensor.shape,
        prescale_factor,
        postscale_factor,
        place,
    )
    return Handle(operation, tensor, finish)


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    _wake: bool = True,
) -> Handle:
    """Starts `broadcast` and returns; `synchronize` gives the result. Not differentiable."""
    code = _checked("broadcast", tensor, None, process_set)
    root = _checked_root(root_rank)
    if not tensor.is_contiguous() or not tensor.is_cpu or tensor.is_neg():
        source = output = _host_copy(tensor)
        finish = _to_device(output, tensor)
    else:
        source = tensor
        output = torch.empty_like(tensor)
        finish = None
    operation = _post(
        _wake,
        _BROADCAST,
        name,
        code,
        0,
        root,
        source.data_ptr(),
        output.data_ptr(),
        tensor.shape,
        1.0,
        1.0,
        (source, output),
    )
    return Handle(operation, output, finish)


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    _wake: bool = True,
) -> Handle:
    """Starts `broadcast_` and returns; `synchronize` gives the tensor with the root's values."""
    code = _checked("broadcast_", tensor, None, process_set)
    root = _checked_root(root_rank)
    place, finish = _in_place("broadcast_", tensor)
    address = place.data_ptr()
    operation = _post(
        _wake, _BROADCAST, name, code, 0, root, address, address, tensor.shape, 1.0, 1.0, place
    )
    return Handle(operation, tensor, finish)


def allgather_async(
    tensor: torch.Tensor,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    _wake: bool = True,
) -> Handle:
    """Starts `allgather` and returns; `synchronize` gives the result. Not differentiable.

    Arguments, result and errors as those of `allgather`.
    """
    code = _checked("allgather", tensor, None, process_set)
    if not tensor.dim():
        raise ValueError("allgather: a scalar has no first dimension; use tensor.reshape(1)")
    plain = tensor.is_contiguous() and tensor.is_cpu and not tensor.is_neg()
    source = tensor if plain else _host_copy(tensor)
    operation = _post(
        _wake, _ALLGATHER, name, code, 0, 0, source.data_ptr(), 0, tensor.shape, 1.0, 1.0, source
    )
    dtype, device = tensor.dtype, tensor.device

    def finish(operation: _core.Operation) -> torch.Tensor:
        gathered = from_dlpack(operation.capsule())
        if gathered.dtype is not dtype:
            gathered = gathered.view(dtype)
        return gathered.to(device)

    return Handle(operation, None, finish)


def barrier_async(name: str | None = None, _wake: bool = True) -> Handle:
    """Starts a barrier: it ends when every rank has started it."""
    return Handle(_post(_wake, _BARRIER, name, _UINT8, 0, 0, 0, 0, _NO_SHAPE, 1.0, 1.0, None), None)


def rows_of(handle: Handle) -> tuple[int, ...]:
    """Of an allgather that has ended: every member's first dimension."""
    return handle._operation.rows()


def reduce_op(average: bool | None, op: object) -> ReduceOp:
    """The op that is meant, by itself or by the deprecated `average`.

    Raises:
        ValueError: both are given, or `op` is none of hvdlite's.
    """
    if average is not None:
        if op is not None:
            raise ValueError("average and op are both given; leave average, it is deprecated")
        warnings.warn(
            "average is deprecated, use op=hvdlite.Average or op=hvdlite.Sum instead",
            DeprecationWarning,
            stacklevel=_outside_hvdlite(),
        )
        return Average if average else Sum
    if op is None:
        return Average
    if not isinstance(op, ReduceOp):
        known = ", ".join(member.name for member in ReduceOp)
        raise ValueError(f"op={op!r} is not one of hvdlite's: {known}")
    return op


def _post(wake: bool, kind: int, name: str | None, *operation: object) -> _core.Operation:
    active = world.active
    if active is None:
        raise NotInitializedError
    if name is None:
        return active.post(kind, active.unnamed(0), True, *operation, 0, wake)
    return active.post(kind, name, name.__class__ is Unnamed, *operation, 0, wake)


def _checked(
    operation: str, tensor: torch.Tensor, op: ReduceOp | None, process_set: ProcessSet
) -> int:
    """The core's number for the tensor's dtype, if the operation can be done at all."""
    if world.active is None:
        raise NotInitializedError
    check_process_set(operation, process_set)
    if not isinstance(tensor, torch.Tensor):
        raise _not_a_tensor(operation, tensor)
    code = DTYPES.get(tensor.dtype)
    if code is None:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ValueError(f"{operation}: {tensor.dtype} is not supported; expected one of {known}")
    if code == _BOOL and op is Average:
        raise ValueError(f"{operation}: bool has no average; use op=Sum (or), op=Min (and)")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{operation}: a {tensor.layout} tensor; expected a dense one")
    return code


def check_process_set(operation: str, process_set: ProcessSet) -> None:
    """Raises ValueError where the operation can't be done among these."""
    if process_set is not global_process_set:
        raise ValueError(f"{operation}: process_set={process_set!r} is not global_process_set")


def _checked_root(root_rank: int) -> int:
    size = world.size()
    if not isinstance(root_rank, int) or not 0 <= root_rank < size:
        raise ValueError(
            f"broadcast: root_rank={root_rank!r}, expected a rank from 0 to {size - 1}"
        )
    return root_rank


def _in_place(
    operation: str, tensor: torch.Tensor
) -> tuple[torch.Tensor, Callable[[_core.Operation], torch.Tensor] | None]:
    """Where in host memory the operation works, and what brings its result to the tensor."""
    if tensor.is_neg():  # a lazy view: its memory holds other values
        raise ValueError(
            f"{operation}: the tensor is a negated view and can't be changed in place; call "
            "resolve_neg() on it"
        )
    if not tensor.is_contiguous():
        raise ValueError(
            f"{operation}: the tensor is not contiguous (shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()}) and can't be changed in place; use {operation.rstrip('_')}"
        )
    # autograd must learn that a tensor that it may have saved has changed.
    torch.autograd.graph.increment_version(tensor)
    if tensor.is_cpu:
        return tensor, None
    host = gpu.to_host(tensor)

    def finish(_: _core.Operation) -> torch.Tensor:
        with torch.no_grad():
            return tensor.copy_(host)

    return host, finish


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_cpu:
        return tensor.detach().resolve_neg().contiguous()
    return gpu.to_host(tensor)


def _to_device(
    output: torch.Tensor, tensor: torch.Tensor
) -> Callable[[_core.Operation], torch.Tensor] | None:
    """Brings the result to where the input was, if that is not here."""
    if tensor.is_cpu:
        return None
    device = tensor.device
    return lambda _: output.to(device)


def _outside_hvdlite() -> int:
    """For warnings.warn: how far up the caller is that is not hvdlite."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__package__") == __package__:
        frame, level = frame.f_back, level + 1
    return level


def _not_a_tensor(operation: str, thing: object) -> ValueError:
    return ValueError(f"{operation}: expected a torch.Tensor, got {type(thing).__name__}")


def _not_a_handle(thing: object) -> ValueError:
    return ValueError(
        f"expected a handle that an asynchronous operation returned, got {type(thing).__name__}"
    )
