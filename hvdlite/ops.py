"""The words of a collective: reduce ops and element types, and their numbers in the core."""

from __future__ import annotations

import enum

import torch

from hvdlite import _core


class ReduceOp(enum.IntEnum):
    """How the ranks' values become one.

    For bool, Sum and Max are or, Product and Min are and; Average is not defined.
    """

    Average = _core.AVERAGE
    Sum = _core.SUM
    Min = _core.MIN
    Max = _core.MAX
    Product = _core.PRODUCT

    def __repr__(self) -> str:
        return self.name


Average = ReduceOp.Average
Sum = ReduceOp.Sum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product

DTYPES: dict[torch.dtype, int] = {
    torch.uint8: _core.UINT8,
    torch.int8: _core.INT8,
    torch.int16: _core.INT16,
    torch.int32: _core.INT32,
    torch.int64: _core.INT64,
    torch.float16: _core.FLOAT16,
    torch.bfloat16: _core.BFLOAT16,
    torch.float32: _core.FLOAT32,
    torch.float64: _core.FLOAT64,
    torch.bool: _core.BOOL,
}
