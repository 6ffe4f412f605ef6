"""Signal handlers that a library has installed in C, as faulthandler and MPICH do: Python does not
know them, and drops them when it installs its own."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable

_SIG_IGN = 1  # SIG_DFL is 0
_SA_SIGINFO = 4
_MASK_BITS = 1024


class _Action(ctypes.Structure):
    """`struct sigaction` of Linux's C libraries."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * (_MASK_BITS // (8 * ctypes.sizeof(ctypes.c_ulong)))),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class NotCallable(Exception):
    """A handler that wants to know more than the signal's number."""


def find(number: int) -> Callable[[int], object] | None:
    """The signal's handler if that is a C function; None if Python has installed one, or there is
    none. It may be called outside of a signal's context, as Python's own handlers are.

    Raises NotCallable."""
    if callable(signal.getsignal(number)):
        return None
    action = _Action()
    ctypes.CDLL(None).sigaction(number, None, ctypes.byref(action))
    if (action.handler or 0) <= _SIG_IGN:
        return None
    if action.flags & _SA_SIGINFO:
        raise NotCallable
    # With the GIL, as it may look at Python's threads.
    return ctypes.PYFUNCTYPE(None, ctypes.c_int)(action.handler)
