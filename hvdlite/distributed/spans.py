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


def begin(label: str, form: str, tensors: Sequence[torch.Tensor]) -> Callable[[], None] | None:
    """Begins a span if the profiler runs; the result ends it, in any thread."""
    if not _profiler_enabled():
        return None
    handle = _record_function_with_args_enter(f"{label}:{form}", *tensors)
    return functools.partial(_record_function_with_args_exit, handle)
