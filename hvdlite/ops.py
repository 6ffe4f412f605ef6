"""Reduce ops and element types, and their numbers in the core."""

from __future__ import annotations

import enum

import torch

from hvdlite import _core


class ReduceOp(enum.IntEnum):
    """How the ranks' values become one.

    For bool, Sum and Max are or, Product and Min are and; Average and Adasum are not defined.

    Adasum(a, b) = (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b, and a + b where one of them is zero:
    orthogonal tensors are added, parallel ones averaged (Maleki et al., "Scaling Distributed
    Training with Adaptive Summation", 2020). With p the largest power of two among the number of
    members, member r >= p is combined into r - p first, then pairs at distance 1, 2, 4 and so on.
    The dot products are in float64, over each whole tensor.
    """

    Average = _core.AVERAGE
    Sum = _core.SUM
    Min = _core.MIN
    Max = _core.MAX
    Product = _core.PRODUCT
    Adasum = _core.ADASUM

    def __repr__(self) -> str:
        return self.name


Average = ReduceOp.Average
Sum = ReduceOp.Sum
Min = ReduceOp.Min
Max = ReduceOp.Max
Product = ReduceOp.Product
Adasum = ReduceOp.Adasum

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

# In torch 2.10 and later, tensors themselves tell the core where their memory is.
_exchange_api = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
TENSORS_ARE_DESCRIBED: bool = _exchange_api is not None and _core.use_tensors(
    _exchange_api,
    (torch.Tensor, torch.nn.Parameter),
    # The public function takes twice as long.
    getattr(torch._C, "_increment_version", torch.autograd.graph.increment_version),
)
