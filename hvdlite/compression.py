"""Compression: converts a tensor before it is sent, and back afterwards.

Numbers sent as 16 bits are added in float32, and rounded once per host and once at the end.
"""

from __future__ import annotations

import torch


class Compressor:
    """Leaves everything as it is. Subclasses say what floating-point tensors travel as."""

    wire_dtype: torch.dtype | None = None

    @classmethod
    def travels_as(cls, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a tensor of `dtype` travels."""
        if cls.wire_dtype is None or not dtype.is_floating_point:
            return dtype
        return cls.wire_dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
        """What travels, and what `decompress` needs."""
        return tensor.to(cls.travels_as(tensor.dtype)), tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: torch.dtype) -> torch.Tensor:
        """A tensor of the dtype that it had before."""
        return tensor.to(ctx)


class Fp16Compressor(Compressor):
    """Floating-point tensors travel as float16: larger than 65504 becomes inf."""

    wire_dtype = torch.float16


class Bf16Compressor(Compressor):
    """Floating-point tensors travel as bfloat16: float32's range with 8 bits of precision."""

    wire_dtype = torch.bfloat16


class Compression:
    """The choices for the argument `compression`.

    Example:
        >>> hvd.allreduce(torch.ones(2), op=hvd.Sum, compression=hvd.Compression.bf16)
        tensor([2., 2.])
    """

    none = Compressor
    fp16 = Fp16Compressor
    bf16 = Bf16Compressor
