"""Fingerprints of tensors: 64 bits, of which one at least is another if one bit of the tensor is.

In host memory and on a device alike it is a sum modulo 2⁶⁴: of words of 32 bits, each times an odd
number of its place in a row of words; and of the rows' sums, each times an odd number of the row.
(The rows are longer on a device, as the numbers are.) Why it notices what it must:

- One flipped bit changes one word by ±2ᵇ with b < 32, so the sum of its row by 2ᵇ times an odd
  number, and the sum of the rows likewise: that is not 0 modulo 2⁶⁴.
- Two words of a row in host memory are swapped: its sum changes by the product of their difference
  and that of their numbers. The numbers of a row have 32 bits, and no two are the same, so that the
  product is not 0 modulo 2⁶⁴.

All other differences are missed with a probability of about 2⁻³².
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from hvdlite import _core
from hvdlite.tensor_bytes import flat_bytes

_MODULUS = 1 << 64
# On a GPU: the number of words hashed together as a row, and of rows at once.
_WORDS = 1 << 16
_ROWS = 64


def bytes_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor's values as flat bytes on its device: its memory, or a copy if that is not
    contiguous. None if it has no memory that can be read: meta, sparse, a subclass of its own.

    Of a quantized tensor: its integers, and what they stand for.
    """
    if (
        type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        or tensor.layout is not torch.strided
        or tensor.is_meta
        or (tensor.numel() and not tensor.untyped_storage().nbytes())
    ):
        return None
    if tensor.is_quantized:
        return torch.cat(list(map(flat_bytes, (tensor.int_repr(), tensor.detach().dequantize()))))
    values = tensor.detach().resolve_conj().resolve_neg()
    if values.is_complex():
        values = torch.view_as_real(values)
    return flat_bytes(values)


def fingerprint(in_bytes: torch.Tensor) -> int:
    """From 0 to 2⁶⁴ - 1. in_bytes: flat and contiguous, on any device."""
    if in_bytes.is_cpu:
        return _core.fingerprint(in_bytes.data_ptr(), in_bytes.numel())
    return digest(row_sums(in_bytes).tolist())


def row_sums(in_bytes: torch.Tensor) -> torch.Tensor:
    """Sums of words of 32 bits, each times a random odd number of 64 bits, row by row, which the
    device of the bytes computes. Only these sums, one number per row, are copied to the host."""
    factors = _factors(in_bytes.device)
    step = _ROWS * _WORDS * 4
    rows = [torch.empty(0, dtype=torch.int64, device=in_bytes.device)]
    for begin in range(0, in_bytes.numel(), step):
        part = in_bytes[begin : begin + step]
        part = torch.nn.functional.pad(part, (0, -part.numel() % (_WORDS * 4)))
        # The sums wrap around.
        rows.append((part.view(torch.int32).view(-1, _WORDS) * factors).sum(1))
    return torch.cat(rows).cpu()


@functools.lru_cache(maxsize=8)
def _factors(device: torch.device) -> torch.Tensor:
    """The same on every rank."""
    generator = torch.Generator("cpu").manual_seed(_WORDS)
    factors = torch.randint(1 << 62, (_WORDS,), generator=generator, device="cpu") * 2 + 1
    return factors.to(device)


def digest(fingerprints: Iterable[int]) -> int:
    """The sum of numbers, each times the odd number of its place: from 0 to 2⁶⁴ - 1."""
    return sum(number * _factor(index) for index, number in enumerate(fingerprints)) % _MODULUS


def _factor(index: int) -> int:
    """An odd number, for each index one that has nothing to do with the others: the finalizer of
    SplitMix64. With factors in a regular order, differences in a few tensors could cancel out."""
    mixed = (index + 1) * 0x9E3779B97F4A7C15 % _MODULUS
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % _MODULUS
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % _MODULUS
    return (mixed ^ mixed >> 31) | 1
