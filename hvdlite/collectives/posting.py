"""Turns the arguments of a collective into what the engine takes: names, ops, dtypes, memory.

Everything is checked before anything is posted, and the number of an unnamed operation is taken
last, so a refused argument changes nothing.
"""

from __future__ import annotations

import math
import sys
import warnings
from typing import Any

import torch

from hvdlite import _core
from hvdlite.compression import Compressor
from hvdlite.errors import UnsupportedError
from hvdlite.gpu import goes_by_gpu
from hvdlite.ops import DTYPES, Adasum, Average, ReduceOp, Sum
from hvdlite.world.teams.process_sets import ProcessSet, team_of
from hvdlite.world.teams.team import Team

BOOL = _core.BOOL
_dtype_of = _core.dtype_of


class Unnamed(str):
    """A name from `Team.unnamed`, passed on in place of None."""

    __slots__ = ()


def internal(function: str, name: str | None, process_set: ProcessSet) -> str:
    """The name of an operation that `function`, which the user has called, makes: `name`, or if
    that is None one that no other function's operations have. Takes the next unnamed number then.
    """
    if name is not None:
        return name
    number = team_of(function, process_set).unnamed().removeprefix("unnamed.")
    return Unnamed(f"{function} #{number}")


def label(operation: str, name: str | None, process_set: ProcessSet) -> str:
    """The name that the calling thread's next operation will have if the user passes `name`; its
    backward is named after it. Takes no number, as that operation may yet be refused."""
    return team_of(operation, process_set).next_unnamed() if name is None else name


def named(team: Team, name: str | None) -> tuple[str, bool]:
    """The name to post under, and whether it is a generated one."""
    if name is None:
        return team.unnamed(), True
    if not isinstance(name, str):
        raise ValueError(f"name={name!r} is {type(name).__name__}, expected a str or None")
    return name, name.__class__ is Unnamed


def reduce_op(average: bool | None, op: object) -> ReduceOp:
    """The reduce op, from `op` or the deprecated `average`.

    Raises:
        ValueError: Both are given, or `op` is not one of hvdlite's.
    """
    if op.__class__ is ReduceOp and average is None:
        return op
    if average is not None:
        if op is not None:
            raise ValueError("average and op are both given; leave out average, it is deprecated")
        warnings.warn(
            "average is deprecated, use op=hvdlite.Average or op=hvdlite.Sum instead",
            DeprecationWarning,
            stacklevel=3,  # of what the user has called
        )
        return Average if average else Sum
    if op is None:
        return Average
    if not isinstance(op, ReduceOp):
        known = ", ".join(member.name for member in ReduceOp)
        raise ValueError(f"op={op!r} is not one of hvdlite's: {known}")
    return op


def checked(operation: str, tensor: torch.Tensor, op: object = None) -> int:
    """The core's number for the tensor's dtype, if the operation can be done at all."""
    code = _dtype_of(tensor)
    if code < 0:
        code = _checked_closely(operation, tensor)
    if code == BOOL and (op is Average or op is Adasum):
        raise UnsupportedError(f"{operation}: bool has no {op!r}; use op=Sum (or), op=Min (and)")
    return code


def _checked_closely(operation: str, tensor: torch.Tensor) -> int:
    """`checked` for all but ordinary tensors in host memory."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{operation}: expected a torch.Tensor, got {type(tensor).__name__}")
    code = DTYPES.get(tensor.dtype)
    if code is None:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ValueError(f"{operation}: {tensor.dtype} is not supported; expected one of {known}")
    require_memory(operation, tensor)
    goes_by_gpu(tensor)
    return code


def require_memory(operation: str, tensor: torch.Tensor) -> None:
    """Raises ValueError unless the tensor is a dense one whose memory is all there."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        layout = "nested" if tensor.is_nested else tensor.layout
        raise ValueError(f"{operation}: a {layout} tensor; expected a dense one")
    try:
        begin, end, held = _place(tensor)
    except Exception as error:  # subclasses that hold nothing yet raise many kinds
        raise ValueError(
            f"{operation}: a {type(tensor).__name__} on {tensor.device.type} has no memory to "
            "send: it only stands for a tensor, like a fake or meta tensor, a wrapper or a lazy "
            "parameter; pass a tensor that holds the values"
        ) from error
    if end > held:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(
            f"{operation}: {dtype}{list(tensor.shape)} has no memory: it lies at bytes {begin} to "
            f"{end} of a storage of {held} bytes, which was freed or shrunk; first resize the "
            "storage to its old size and fill it"
        )


def _place(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Where the tensor begins and ends in its storage, and the storage's size, in bytes.

    Raises:
        RuntimeError: There is no storage, or it has no memory on any device.
    """
    if not tensor.numel() and not tensor.is_meta:
        return 0, 0, 0
    storage = tensor.untyped_storage()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    begin: Any = tensor.storage_offset()
    end: Any = begin + 1 + sum([(size - 1) * stride for size, stride in pairs])
    if storage.device.type == "meta" or (storage.nbytes() and not storage.data_ptr()):
        raise RuntimeError("a storage without memory")
    return begin * tensor.itemsize, end * tensor.itemsize, storage.nbytes()


def require_sum(operation: str, op: object) -> None:
    """Raises ValueError unless the op is Average or Sum."""
    if op is not Average and op is not Sum:
        kind = UnsupportedError if isinstance(op, ReduceOp) else ValueError
        raise kind(f"{operation}: op={op!r}, expected Average or Sum")


def factors(operation: str, code: int, prescale: Any, postscale: Any) -> tuple[float, float]:
    """The scale factors as the engine takes them. Called unless both are floats and the dtype is
    not bool.

    Raises:
        ValueError: Not numbers, a number too large for float64, or bool tensors.
    """
    try:
        # Anything that converts to float, as for a scalar in torch, except text.
        pair = math.ldexp(prescale, 0), math.ldexp(postscale, 0)
    except OverflowError:
        raise ValueError(
            f"{operation}: prescale_factor or postscale_factor is too large for a float64; "
            f"expected at most {sys.float_info.max:.1e}"
        ) from None
    except (TypeError, ValueError, RuntimeError):  # the last: a tensor of several elements
        raise ValueError(
            f"{operation}: prescale_factor={prescale!r} and postscale_factor={postscale!r}: "
            "expected two numbers (1.0 for no scaling)"
        ) from None
    if code == BOOL and pair != (1.0, 1.0):
        raise ValueError(
            f"{operation}: bool takes no scale factors, got prescale_factor={prescale!r} and "
            f"postscale_factor={postscale!r}"
        )
    return pair


def checked_compression(operation: str, compression: object) -> None:
    """Raises ValueError unless it is a compressor."""
    if isinstance(compression, type) and issubclass(compression, Compressor):
        return
    if not all(callable(getattr(compression, step, None)) for step in ("compress", "decompress")):
        raise ValueError(
            f"{operation}: compression={compression!r}, expected hvdlite.Compression.none, .fp16 "
            "or .bf16"
        )


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor if its memory holds its values in order, else a copy."""
    if tensor.is_contiguous() and not tensor.is_neg():
        return tensor
    return tensor.detach().resolve_neg().contiguous()


def refuse_in_place(operation: str, tensor: torch.Tensor) -> None:
    """Raises ValueError for a tensor that can't be changed in place."""
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


def differentiable(tensor: torch.Tensor) -> bool:
    """Whether autograd records the operation. (A non-tensor is refused later.)"""
    return isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled()
