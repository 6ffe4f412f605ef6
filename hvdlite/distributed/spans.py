"""Spans of operations in torch's profiler: "hvdlite:all_reduce", with the tensors' shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch._C._autograd import (
    _profiler_enabled,
    _record_function_with_args_enter,
    _record_function_with_args_exit,
)

enabled: Callable[[], bool] = _profiler_enabled


def begin(name: str, tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Begins a span; the result ends it, in any thread."""
    handle = _record_function_with_args_enter(name, *tensors)
    return functools.partial(_record_function_with_args_exit, handle)
