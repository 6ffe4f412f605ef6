"""Spans of operations in torch's profiler: "hvdlite:all_reduce", with the tensors' shapes."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
from torch._C._autograd import (
    _profiler_enabled,
    _record_function_with_args_enter,
    _record_function_with_args_exit,
)

enabled: Callable[[], bool] = _profiler_enabled


class _Thread(threading.local):
    in_one = False


_thread = _Thread()


def needed() -> bool:
    """Whether an operation has a span of its own."""
    return enabled() and not _thread.in_one


@contextlib.contextmanager
def one_for_all() -> Iterator[None]:
    """Operations inside have no spans: one call starts them, and has one."""
    _thread.in_one = True
    try:
        yield
    finally:
        _thread.in_one = False


def begin(name: str, tensors: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Begins a span; the result ends it, in any thread."""
    handle = _record_function_with_args_enter(name, *tensors)
    return functools.partial(_record_function_with_args_exit, handle)
