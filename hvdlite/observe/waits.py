"""What is seen of a thread that waits for operations: spans in torch's profiler, and the time.

While nobody looks, a wait costs one call of `observed`.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler import record_function


class Labelled(Protocol):
    def label(self) -> tuple[str, str]: ...


class Pollable(Protocol):
    def poll(self) -> bool: ...


# A thread that asks again whether an operation has ended has waited since it asked before, if it
# asks so soon again that it can have done nothing else, or if it slept meanwhile. (Longer than a
# nap, it sleeps for something of its own.) Else it computes between two questions, which is what
# `poll` is for.
_AT_ONCE_S = 10e-6
_NAP_S = 0.02
# Who sleeps uses no more than these parts of the time: the thread, and the whole process, of which
# other threads may compute for this one, and hvdlite's own moves data.
_MOST_CPU = 0.1
_MOST_CPU_OF_ALL = 0.5

# The name of an operation without one of its own (`Team.unnamed`), or its end (`posting.internal`).
_NUMBER = re.compile(r"^unnamed\..*|(?<=.) #\d+( of thread \d+)?( after join \d+)?(?=$|\.)")


class _Asked(NamedTuple):
    """A thread has asked whether an operation has ended, and it had not."""

    at: float
    cpu: float
    cpu_of_all: float
    operation: int


class _Thread(threading.local):
    """What is counted of each thread. (Each thread that uses it gets the values of the class.)"""

    waits = False
    asked: _Asked | None = None
    waited_s = 0.0
    # Whether Python did not start it: autograd's own threads, which run the backward pass on
    # devices. None: not known yet.
    is_foreign: bool | None = None


class Waits:
    """The time that threads of this process have waited for operations, in seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waited_s = self._foreign_s = 0.0
        self._thread = _Thread()

    def read(self) -> float:
        """Of all threads."""
        with self._lock:
            return self._waited_s

    def read_own(self) -> float:
        """Of this thread alone."""
        return self._thread.waited_s

    def read_of_step(self) -> float:
        """Of this thread, which trains, and of autograd's threads, for which it waits meanwhile.
        Other threads, such as one that writes a log, hold it up no longer than they make it wait
        itself."""
        foreign_s = self._foreign_s
        return foreign_s if self._thread.is_foreign else foreign_s + self._thread.waited_s

    def counting(self) -> contextlib.AbstractContextManager[None]:
        """Counts the time inside. A wait inside another one counts once."""
        return _NOTHING if self._thread.waits else _Counting(self)

    def begin(self) -> float:
        self._thread.waits = True
        self._thread.asked = None
        return time.perf_counter()

    def end(self, begin: float) -> None:
        self._thread.waits = False
        self._add(time.perf_counter() - begin)

    def has_ended(self, operation: Pollable) -> bool:
        """Asks it: `while not hvd.poll(handle)` is a wait, too."""
        thread = self._thread
        if thread.waits:
            return operation.poll()  # the time counts as a whole
        begin = time.perf_counter()
        before, cpu, cpu_of_all = thread.asked, time.thread_time(), time.process_time()
        has_ended = operation.poll()
        at = time.perf_counter()
        waited_s = at - begin
        if before is not None:
            seconds = begin - before.at
            sleeps = (
                seconds <= _NAP_S
                and cpu - before.cpu <= _MOST_CPU * seconds
                and cpu_of_all - before.cpu_of_all <= _MOST_CPU_OF_ALL * seconds
            )
            if seconds <= _AT_ONCE_S or sleeps:
                waited_s += seconds
        # Of several operations, one that has not ended is still waited for if another one has.
        missing = id(operation) if not has_ended else before and before.operation
        if missing is None or (has_ended and missing == id(operation)):
            thread.asked = None
        else:
            thread.asked = _Asked(at, time.thread_time(), time.process_time(), missing)
        self._add(waited_s)
        return has_ended

    def forget_question(self) -> None:
        """What this thread does from now on is not waiting for what it has asked for."""
        self._thread.asked = None

    def _add(self, waited_s: float) -> None:
        thread = self._thread
        thread.waited_s += waited_s
        is_foreign = thread.is_foreign
        if is_foreign is None:
            is_foreign = isinstance(threading.current_thread(), threading._DummyThread)
            thread.is_foreign = is_foreign
        with self._lock:
            self._waited_s += waited_s
            if is_foreign:
                self._foreign_s += waited_s


_NOTHING = contextlib.nullcontext()


class _Counting(contextlib.AbstractContextManager[None]):
    """As a class, as it is a third of the time of contextlib's generators."""

    __slots__ = ("_begin", "_waits")

    def __init__(self, waits: Waits) -> None:
        self._waits = waits

    def __enter__(self) -> None:
        self._begin = self._waits.begin()

    def __exit__(self, *_: object) -> None:
        self._waits.end(self._begin)


def has_ended(operation: Pollable) -> bool:
    """Asks an operation, without blocking."""
    return operation.poll() if _counted is None else _counted.has_ended(operation)


# None: the time is not counted.
_counted: Waits | None = None
# Is told the name and the beginning, in ns of the monotonic clock, of each wait that has ended and
# was not inside another one; None: no timeline is written.
_told: Callable[[str, int], None] | None = None
_inside = threading.local()


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


def tell(told: Callable[[str, int], None] | None) -> None:
    """Tells of all waits from now on; None: no longer."""
    global _told, observed
    _told = told
    observed = _profiler_enabled if told is None and _counted is None else _always


def name_of(operation: object) -> str:
    """The name of the span of an operation: `hvdlite::allreduce gradients`; of one without a name,
    its kind alone."""
    label = getattr(operation, "label", None)
    if label is None:
        return "hvdlite::wait"
    kind, name = label()
    # Without the number of an operation that has none of its own name.
    name = _NUMBER.sub("", name)
    return f"hvdlite::{kind} {name}".rstrip()


def counting() -> contextlib.AbstractContextManager[None]:
    """To be wrapped around a wait that has a span already: counts the time if it is counted."""
    return _NOTHING if _counted is None else _counted.counting()


def waiting(operation: Labelled | str) -> contextlib.AbstractContextManager[None]:
    """To be wrapped around a wait if `observed()`. operation: it, or the name of the span."""
    looks = _profiler_enabled() or _told is not None
    return _with_span(operation) if looks else counting()


@contextlib.contextmanager
def _with_span(operation: Labelled | str) -> Iterator[None]:
    name = operation if isinstance(operation, str) else name_of(operation)
    told = None if getattr(_inside, "a_wait", False) else _told
    begin_ns = time.monotonic_ns()
    with counting(), record_function(name) if _profiler_enabled() else _NOTHING:
        if told is None:
            yield
            return
        _inside.a_wait = True
        try:
            yield
        finally:
            _inside.a_wait = False
            told(name, begin_ns)
