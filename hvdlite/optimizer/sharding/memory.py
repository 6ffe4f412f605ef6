"""Tensors as their memory: one dimension, in the order in which it lies there."""

from __future__ import annotations

import torch

from hvdlite.optimizer.buckets.slot import strides_in_place


def has_gaps(tensor: torch.Tensor) -> bool:
    """Whether its elements are not one piece of memory, each once."""
    return bool(tensor.numel()) and not tensor.is_contiguous() and strides_in_place(tensor) is None


def in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """A view of one dimension of a tensor without gaps. It shares the version counter, so that
    autograd notices changes."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def laid_out_as(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The tensor's elements in the order of memory that these strides give, which leave no gaps: a
    view, if it lies so."""
    if tensor.stride() != stride:
        copy = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
        tensor = copy.copy_(tensor.detach())
    return in_memory_order(tensor)
