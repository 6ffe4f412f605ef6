"""Parameters as their memory: one dimension, in the order in which it lies there."""

from __future__ import annotations

import torch

from hvdlite.optimizer.buckets.slot import strides_in_place


def has_gaps(param: torch.Tensor) -> bool:
    """Whether its elements are not one piece of memory, each once."""
    return bool(param.numel()) and not param.is_contiguous() and strides_in_place(param) is None


def in_memory_order(param: torch.Tensor) -> torch.Tensor:
    """A view of one dimension of a tensor without gaps. It shares the version counter, so that
    autograd notices changes."""
    return param.detach().as_strided((param.numel(),), (1,), param.storage_offset())


def laid_out_as(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """The tensor's elements in the order of the parameter's memory: a view, if it lies as the
    parameter does."""
    if tensor.stride() != param.stride():
        copy = torch.empty_strided(
            param.shape, param.stride(), dtype=tensor.dtype, device=tensor.device
        )
        tensor = copy.copy_(tensor.detach())
    return in_memory_order(tensor)
