"""Makes the tensors of results whose size is known only when an operation has ended."""

from __future__ import annotations

import torch
from torch.utils.dlpack import from_dlpack

from hvdlite import _core


def gathered_result(operation: _core.Operation, dtype: torch.dtype) -> torch.Tensor:
    """The rows that the engine has gathered, in host memory. Call it once, after the operation has
    succeeded."""
    made = operation.capsule()
    if isinstance(made, tuple):
        # No elements: from_dlpack refuses shapes that would be too large if the 0 in them were 1.
        return torch.empty(made, dtype=dtype, device="cpu")
    result = from_dlpack(made)
    return result if result.dtype is dtype else result.view(dtype)
