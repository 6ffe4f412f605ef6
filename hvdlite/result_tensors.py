"""The tensors of results whose size is known only when an operation has ended."""

from __future__ import annotations

import torch
from torch.utils.dlpack import from_dlpack

from hvdlite import _core


def received(operation: _core.Operation, dtype: torch.dtype) -> torch.Tensor:
    """What the engine has gathered, in host memory. Once, after the operation has ended well."""
    made = operation.capsule()
    if isinstance(made, tuple):
        # No elements. from_dlpack refuses dimensions whose product is too large without the zero.
        return torch.empty(made, dtype=dtype, device="cpu")
    result = from_dlpack(made)
    return result if result.dtype is dtype else result.view(dtype)
