"""What is seen of a thread that waits for operations: spans in torch's profiler, and the time.

While nobody looks, a wait costs one call of `observed`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler import record_function


class Labelled(Protocol):
    def label(self) -> tuple[str, str]: ...


class Waits:
    """The time that threads of this process have waited for operations, in seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waited_s = 0.0
        self._thread = threading.local()

    def read(self) -> float:
        with self._lock:
            return self._waited_s

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Counts the time inside. A wait inside another one counts once."""
        if getattr(self._thread, "waits", False):
            yield
            return
        self._thread.waits = True
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._thread.waits = False
            with self._lock:
                self._waited_s += time.perf_counter() - begin


# None: the time is not counted.
_counted: Waits | None = None


def _always() -> bool:
    return True


# Whether somebody looks: torch's profiler is on in this thread, or the time is counted.
observed: Callable[[], bool] = _profiler_enabled


def count_time() -> Waits:
    """Counts the time of all waits from now on."""
    global _counted, observed
    if _counted is None:
        _counted = Waits()
        observed = _always
    return _counted


def name_of(operation: object) -> str:
    """The name of the span of an operation: `hvdlite::allreduce gradients`; of one without a name,
    its kind alone."""
    label = getattr(operation, "label", None)
    if label is None:
        return "hvdlite::wait"
    kind, name = label()
    return f"hvdlite::{kind}" if name.startswith("unnamed.") else f"hvdlite::{kind} {name}"


def counting() -> contextlib.AbstractContextManager[None]:
    """To be wrapped around a wait that has a span already: counts the time if it is counted."""
    return contextlib.nullcontext() if _counted is None else _counted.counting()


@contextlib.contextmanager
def waiting(operation: Labelled | str) -> Iterator[None]:
    """To be wrapped around a wait if `observed()`. operation: it, or the name of the span."""
    with contextlib.ExitStack() as stack:
        if _counted is not None:
            stack.enter_context(_counted.counting())
        if _profiler_enabled():
            name = operation if isinstance(operation, str) else name_of(operation)
            stack.enter_context(record_function(name))
        yield
