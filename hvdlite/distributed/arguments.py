"""Turns the arguments of c10d's calls into what the engine takes: memory, ops, seconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import AllreduceOptions, ReduceOp

from hvdlite import _core
from hvdlite.ops import DTYPES
from hvdlite.tensor_bytes import flat_bytes

Tensor = torch.Tensor

# Options hold this where the caller gave no timeout (kUnsetTimeout).
UNSET = AllreduceOptions().timeout

_STRIDED = torch.strided
_BITWISE = ("BAND", "BOR", "BXOR")
_CALLED = {"AVG": "AVERAGE", "PREMUL_SUM": "SUM"}
# The engine's number of each of c10d's ops.
OPS: dict[Any, int] = {
    getattr(ReduceOp, name): getattr(_core, _CALLED.get(name, name))
    for name in ("SUM", "AVG", "MIN", "MAX", "PRODUCT", "PREMUL_SUM", *_BITWISE)
}
_REAL_OPS = {_core.SUM, _core.AVERAGE}
_SUM = ReduceOp.SUM
_PREMUL_SUM = ReduceOp.PREMUL_SUM
_SUM_AS_IT_IS = _core.SUM, 1.0


def reduce_op(form: str, op: Any, dtype: torch.dtype) -> tuple[int, float]:
    """The engine's op, and the factor by which each rank's tensor is multiplied first.

    Raises:
        ValueError: There is no such op for this dtype.
    """
    if op == _SUM:  # of any dtype; c10d's objects are slow to look up in a table
        return _SUM_AS_IT_IS
    kind = getattr(op, "op", op)
    code = OPS.get(kind)
    if code is None:
        raise ValueError(f"{form}: the reduce op {kind} is not supported")
    factor = 1.0
    if kind == _PREMUL_SUM:
        factor = float(op.__getstate__()[1])
    if dtype.is_complex and code not in _REAL_OPS:
        raise ValueError(f"{form}: {dtype} has no {kind.name}; complex numbers can be summed")
    if kind.name in _BITWISE and dtype.is_floating_point:
        raise ValueError(f"{form}: {dtype} has no {kind.name}; it takes integers and bool")
    if dtype is torch.bool and (code == _core.AVERAGE or kind == _PREMUL_SUM):
        raise ValueError(f"{form}: {dtype} has no {kind.name}; use MAX (or), MIN (and)")
    return code, factor


def seconds(timeout: timedelta, default_s: float) -> float:
    """The timeout of one call; that of the group if the call has none."""
    return default_s if timeout == UNSET else timeout.total_seconds()


def reducible(form: str, tensor: Tensor) -> Tensor:
    """A contiguous tensor of the same values that the engine can reduce; the tensor itself, or a
    view of it, where its memory has this form.

    Raises:
        ValueError: A dtype that can't be reduced, or a sparse tensor.
    """
    if tensor.dtype in DTYPES and _is_plain(tensor):
        return tensor
    plain = _plain(form, tensor)
    if plain.dtype not in DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ValueError(f"{form}: {plain.dtype} can't be reduced; expected one of {known}")
    return plain


def movable(form: str, tensor: Tensor) -> Tensor:
    """The values of a tensor of any dtype as one dimension of a dtype that the engine has: the
    tensor, or a view of it, where it is contiguous, else a copy.

    Raises:
        ValueError: A sparse tensor.
    """
    if tensor.dtype in DTYPES and _is_plain(tensor):
        return tensor if tensor.dim() == 1 else tensor.detach().view(-1)
    flat = _plain(form, tensor).view(-1)
    return flat if flat.dtype in DTYPES else flat_bytes(flat)


def landing(form: str, tensor: Tensor) -> Tensor:
    """As `movable`, for a result: memory that is not the tensor's holds no values."""
    dense = tensor.layout is _STRIDED  # else `movable` refuses it
    if dense and (not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg()):
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return movable(form, tensor)


def _is_plain(tensor: Tensor) -> bool:
    """Whether the tensor's memory holds its values, one after the other."""
    return tensor.layout is _STRIDED and tensor.is_contiguous() and not tensor.is_neg()


def _plain(form: str, tensor: Tensor) -> Tensor:
    """A plain one of the same real numbers."""
    if tensor.layout is not _STRIDED:
        raise ValueError(f"{form}: a {tensor.layout} tensor; expected a dense one")
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg().contiguous()


def filling(tensors: Sequence[Tensor], result: Any) -> Callable[[Any], None] | None:
    """What writes a result, which came from `movable`, `landing` or `reducible`, into those of the
    tensors that do not share its memory; None: all do. result: a tuple has one for each tensor.
    """
    flats = result if isinstance(result, tuple) else (result,)
    apart = [
        (tensor.detach(), flat)
        for tensor, flat in zip(tensors, flats, strict=True)
        if tensor is not flat and tensor.data_ptr() != flat.data_ptr() and flat.numel()
    ]

    def fill(_: Any) -> None:
        for tensor, flat in apart:
            if tensor.dtype.is_complex:
                tensor.copy_(torch.view_as_complex(flat.view(*tensor.shape, 2)))
            else:
                values = flat if flat.dtype == tensor.dtype else flat.view(tensor.dtype)
                tensor.copy_(values.view(tensor.shape))

    return fill if apart else None


def one_device(form: str, tensors: Sequence[Tensor]) -> bool:
    """Whether the tensors lie in host memory. (False: on a GPU.)

    Raises:
        ValueError: Neither, or on both.
    """
    kinds = {tensor.device.type for tensor in tensors}
    if kinds <= {"cpu"}:
        return True
    if kinds == {"cuda"}:
        return False
    raise ValueError(f"{form}: tensors on {', '.join(sorted(kinds))}; expected cpu or cuda")


def same_dtype(form: str, tensors: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Raises ValueError unless all tensors have this dtype."""
    for index, tensor in enumerate(tensors):
        if tensor.dtype is not dtype:
            raise ValueError(
                f"{form}: invalid tensor type at index {index}: {tensor.dtype}, expected {dtype}"
            )


def check_parts(form: str, parts: Sequence[Tensor], size: int, dtype: torch.dtype) -> None:
    """Raises ValueError unless there is a tensor of this dtype for each rank."""
    if len(parts) != size:
        raise ValueError(f"{form}: a list of {len(parts)} tensors, expected {size}: one per rank")
    same_dtype(form, parts, dtype)


def check_whole(form: str, which: str, whole: Tensor, part: Tensor, size: int) -> None:
    """Raises ValueError unless one tensor has room for a part of each rank."""
    same_dtype(form, [part], whole.dtype)
    if whole.numel() != size * part.numel():
        raise ValueError(
            f"{form}: the {which} has {whole.numel()} elements, expected {size} times the "
            f"{part.numel()} of one rank"
        )


def check_sizes(form: str, parts: Sequence[Tensor], expected: Tensor) -> None:
    """Raises ValueError unless all are as long as one."""
    for part in parts:
        if len(part) != len(expected):
            raise ValueError(
                f"{form}: a tensor of {part.nbytes} bytes, expected {expected.nbytes}; parts of "
                "the same rank must be of one size"
            )


def uneven(parts: Sequence[Tensor]) -> tuple[int, ...] | None:
    """The lengths of the parts, unless all are the same."""
    sizes = tuple(map(len, parts))
    return None if sizes.count(sizes[0]) == len(sizes) else sizes


def single(form: str, things: Any) -> Any:
    """The only element: c10d's calls take a list with a tensor for each device of this process."""
    if isinstance(things, Tensor):
        return things
    if len(things) != 1:
        raise ValueError(f"{form}: expected a list of one, got {len(things)}")
    return things[0]


def listed(form: str, things: Any) -> Any:
    """The only list of tensors, which may be given as it is, or a tensor of them."""
    is_list = isinstance(things, Tensor) or (things and isinstance(things[0], Tensor))
    return things if is_list else single(form, things or [])


def counts(form: str, which: str, splits: Sequence[int], tensor: Tensor, size: int) -> list[int]:
    """How many rows of a tensor each member sends or receives; all the same if none are given.

    Raises:
        ValueError: They do not fit the tensor.
    """
    rows = tensor.size(0) if tensor.dim() else 0
    if not splits:
        if rows % size:
            raise ValueError(
                f"{form}: the {which} has {rows} rows, not a multiple of the {size} ranks"
            )
        return [rows // size] * size
    if len(splits) != size:
        raise ValueError(f"{form}: {len(splits)} split sizes for {size} ranks ({which})")
    if sum(splits) != rows or min(splits) < 0:
        raise ValueError(
            f"{form}: the split sizes {list(splits)} do not add up to the {rows} rows of the "
            f"{which}"
        )
    return list(splits)
