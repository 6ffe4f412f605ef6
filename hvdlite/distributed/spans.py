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


class _Thread(threading.local):
    in_one = False


_thread = _Thread()


def begin(label: str, form: str, tensors: Sequence[torch.Tensor]) -> Callable[[], None] | None:
    """Begins a span if the profiler runs; the result ends it, in any thread."""
    if not _profiler_enabled() or _thread.in_one:
        return None
    handle = _record_function_with_args_enter(f"{label}:{form}", *tensors)
    return functools.partial(_record_function_with_args_exit, handle)


@contextlib.contextmanager
def one_for_all(
    label: str, form: str, tensors: Sequence[torch.Tensor]
) -> Iterator[Callable[[], None] | None]:
    """`begin` of a call that starts several operations: inside, these have none of their own."""
    span = begin(label, form, tensors)
    _thread.in_one = span is not None
    try:
        yield span
    finally:
        _thread.in_one = False
