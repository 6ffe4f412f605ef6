"""Whether the thread that calls is the only one that can call collectives: then ranks that wait for
each other in a circle can never go on, and fail at once (`_core/watching/circle.c`)."""

from __future__ import annotations

import signal
import sys
import threading

import torch

# tqdm's redraws bars; it stays after the first bar.
_HARMLESS = {"tqdm._monitor"}


def is_alone() -> bool:
    """Nothing can call a collective while this thread waits in C. True only if that is certain."""
    return (
        threading.current_thread() is threading.main_thread()
        # Those of `_thread` and of C are those that `threading` does not know.
        and len(sys._current_frames()) == 1 + _known_to_be_harmless()
        and threading.active_count() == 1 + _known_to_be_harmless()
        # Within a backward pass, threads of autograd run hooks.
        and torch._C._current_graph_task_id() == -1
        and not _has_signal_handler()
    )


def _known_to_be_harmless() -> int:
    """How many threads libraries have started that many scripts use, and that call nothing."""
    return sum(type(thread).__module__ in _HARMLESS for thread in threading.enumerate())


def _has_signal_handler() -> bool:
    """A handler of the user's runs while the main thread waits."""
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    return any(callable(h) and h is not signal.default_int_handler for h in handlers)
