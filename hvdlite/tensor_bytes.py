"""A tensor's values as bytes."""

from __future__ import annotations

import torch


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The values as flat bytes on their device: the tensor's memory, or a copy if that is not
    contiguous. tensor: dense, of any real dtype."""
    values = tensor.contiguous()
    # Dimensions of size 1 keep any stride, also in `reshape(-1)`, and `view` would refuse that.
    return values.as_strided((values.numel(),), (1,)).view(torch.uint8)
