"""Whether the thread that calls is the only one that can call collectives: then ranks that wait for
each other in a circle can never go on, and fail at once (`_core/watching/circle.c`)."""

from __future__ import annotations

import inspect
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

# What libraries run in threads that call no collective: a class of threads, or a function that a
# thread runs. tqdm's redraws bars, and stays after the first one; the others are of a DataLoader.
_HARMLESS_THREADS = {
    "tqdm._monitor.TMonitor",
    "multiprocessing.queues.Queue._feed",
    "torch.utils.data._utils.pin_memory._pin_memory_loop",
}
# A DataLoader with workers installs it for good. It looks after the workers, and calls the handler
# that it has replaced.
_OF_DATALOADER = "torch.utils.data._utils.signal_handling._set_SIGCHLD_handler.<locals>.handler"

# hvdlite's own handlers, with what finds the handler that each has replaced, and calls.
_own_handlers: list[tuple[Any, Callable[[int], Any]]] = []


def is_alone() -> bool:
    """Nothing can call a collective while this thread waits in C. True only if that is certain."""
    return (
        threading.current_thread() is threading.main_thread()
        and sum(not _is_harmless(thread) for thread in threading.enumerate()) == 1
        # Those of `_thread` and of C are those that `threading` does not know.
        and len(sys._current_frames()) == threading.active_count()
        # Within a backward pass, threads of autograd run hooks.
        and torch._C._current_graph_task_id() == -1
        and not any(_may_call(signal.getsignal(n), n) for n in signal.valid_signals())
    )


def add_own_handler(handler: Any, replaced: Callable[[int], Any]) -> None:
    """`handler` calls no collective itself, only `replaced(signal number)` if that is callable."""
    _own_handlers.append((handler, replaced))


def _is_harmless(thread: threading.Thread) -> bool:
    runs = getattr(thread, "_target", None)
    return not {_name_of(type(thread)), _name_of(runs)}.isdisjoint(_HARMLESS_THREADS)


def _may_call(handler: Any, number: int) -> bool:
    """Python runs handlers while the main thread waits: can this one call a collective?"""
    if not callable(handler) or handler is signal.default_int_handler:
        return False
    for own, replaced in _own_handlers:
        if own == handler:
            return _may_call(replaced(number), number)
    if _name_of(handler) == _OF_DATALOADER:
        return _may_call(inspect.getclosurevars(handler).nonlocals.get("previous_handler"), number)
    return True


def _name_of(what: Any) -> str:
    return f"{getattr(what, '__module__', None)}.{getattr(what, '__qualname__', None)}"
