"""Futures of operations, the one thread that completes them, and the names of what callbacks call.

The thread completes the futures of all groups in the order in which they were asked for; another
thread that waits for an operation's future completes it itself.

What C++ asks for in a backward pass (DDP's reducer) is completed at the end of the pass, by the
thread that runs it: this has to wait then anyway, and a thread that woke up before would take the
core from it. DDP waits in the same place, after this. Where it waits earlier, as it does once for a
static graph, the completing thread finds the future some time later.

A callback runs in that thread, or at once in the thread that adds it to a future that is complete
already; this differs between ranks. So the collectives that callbacks call are not numbered with
the others, but by the future and the callback: the first one in the first callback of operation
"0.7" is "0.7.then0.0", and one in a callback of that callback's future is "0.7.then0.then0.0".

torch's built-in DDP hooks, in C++, want a future of a list of tensors, while a future that Python
makes holds a Python object. What C++ asks for is therefore made by a TorchScript function that
waits for a future of Python's and returns the list.
"""

from __future__ import annotations

import atexit
import collections
import functools
import itertools
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _current_graph_task_id
from torch.autograd import Variable

from hvdlite import _core

Tensor = torch.Tensor

# How long a thread that hands a future to C++ first drives the operation itself. Where the other
# ranks are about as far, it then ends here; a hand-over to other threads costs more than that.
DRIVE_S = 0.001

# After this time the thread completes a future itself that was asked for in a backward pass.
LATE_S = 0.1

# For how long the end of the process lets the thread complete what it can; and then, until it waits
# in the core, which it looks up from every 50 ms.
STOP_S = 1.0
PARK_S = 0.25

# What TorchScript's threads have waited for, kept for some time. If they freed it while the process
# ends, its Python value would need the GIL, and the process would abort.
_kept: collections.deque[Any] = collections.deque(maxlen=256)

# Waits for a future of Python's without holding a thread; fails where it fails.
_TYPED = """
def after(ended: Future[int], tensors: List[Tensor]):
    torch.jit.wait(ended)
    return tensors

def typed(ended: Future[int], tensors: List[Tensor]) -> Future[List[Tensor]]:
    return torch.jit.fork(after, ended, tensors)
"""


# An OperationWork or a SeveralWork.
Ending = Any


class _Context(threading.local):
    """The callback that runs in this thread, and the number of its next collective by group."""

    def __init__(self) -> None:
        self.path: str | None = None
        self.numbers: collections.Counter[str] = collections.Counter()


_context = _Context()


def next_name(group: str) -> str | None:
    """The name of the next collective of the callback that runs in this thread; None: none does."""
    if _context.path is None:
        return None
    number = _context.numbers[group]
    _context.numbers[group] += 1
    return f"{_context.path}.{number}"


class NamedFuture(torch.futures.Future[Any]):
    """A future whose callbacks know what their collectives are called."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self._callbacks = itertools.count()

    def then(self, callback: Callable[[Any], Any]) -> NamedFuture:
        path = f"{self._path}.then{next(self._callbacks)}"
        child = NamedFuture(path)

        def run(future: Any) -> None:
            try:
                result = _inside(path, callback, self)
            except Exception as error:
                child.set_exception(error)
            else:
                child.set_result(result)

        super().add_done_callback(run)
        return child

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        path = f"{self._path}.then{next(self._callbacks)}"
        super().add_done_callback(lambda _: _inside(path, callback, self))


def _inside(path: str, callback: Callable[[Any], Any], future: Any) -> Any:
    outer = _context.path, _context.numbers
    _context.path, _context.numbers = path, collections.Counter()
    try:
        return callback(future)
    finally:
        _context.path, _context.numbers = outer


class OperationFuture(NamedFuture):
    """The list of tensors that an operation has written."""

    def __init__(self, work: Ending) -> None:
        super().__init__(work.name())
        self._work: Ending | None = work
        self._completing = threading.Lock()

    def complete(self) -> None:
        """Waits for the operation; then runs the callbacks, in the first thread that calls it."""
        work = self._work
        if work is None:
            return
        work.settle()
        with self._completing:
            if self._work is None:
                return
            self._work = None
        error = work.exception()
        if error is None:
            self.set_result(work.result())
        else:
            self.set_exception(error)

    def complete_if_ended(self, age_s: float) -> bool:
        """As `complete`, if the operation has ended or is overdue. age_s: of the future."""
        work = self._work
        if work is not None and not work.is_completed() and age_s < work.timeout_s:
            return False
        self.complete()
        return True

    def wait(self) -> list[Tensor]:
        # The completing thread may be the one that calls this, or it may wait for an operation that
        # another rank begins only after this one.
        self.complete()
        tensors: list[Tensor] = super().wait()
        return tensors

    def wait_for_thread(self) -> None:
        """As `wait`; the completing thread ends the work."""
        if threading.get_ident() == _completer.ident:
            self.complete()
        super().wait()


class _Completer:
    """The thread that completes futures: from the first one until the last group is closed."""

    def __init__(self) -> None:
        self.ident: int | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        # None: look at the late ones.
        self._waiting: queue.SimpleQueue[OperationFuture | None] = queue.SimpleQueue()
        # What other threads are expected to complete, and when they were asked for.
        self._late: collections.deque[tuple[float, OperationFuture]] = collections.deque()
        # Whether the thread wakes up for the late ones, every LATE_S.
        self._watching = False
        self._stopping = False

    def add(self, future: OperationFuture) -> None:
        if self.ident is None:
            self._start()
        self._waiting.put(future)

    def add_late(self, future: OperationFuture) -> None:
        """Completes a future that another thread has not completed after LATE_S."""
        if self.ident is None:
            self._start()
        with self._lock:
            self._late.append((time.monotonic(), future))
            watching, self._watching = self._watching, True
        if not watching:
            self._waiting.put(None)

    def _start(self) -> None:
        with self._lock:
            if self.ident is None:
                thread = threading.Thread(target=self._run, name="hvdlite futures", daemon=True)
                thread.start()
                self.ident, self._thread = thread.ident, thread
                atexit.register(self._stop_for_good)

    def stop(self) -> None:
        """Ends the thread, if there is one, when it has completed what it can."""
        with self._lock:
            thread, self._thread = self._thread, None
            self._stopping = True
        if thread is None:
            return
        atexit.unregister(self._stop_for_good)
        self._waiting.put(None)
        if thread is not threading.current_thread():  # a callback may close its group
            thread.join(STOP_S)

    def _stop_for_good(self) -> None:
        """The process ends. A callback may wait for another rank in vain: its thread must not wake
        up while the interpreter ends, as this would end it in the middle of C++, and so abort."""
        thread = self._thread
        self.stop()
        if thread is not None and thread.is_alive():
            _core.park(thread.native_id or 0)
            thread.join(PARK_S)

    def _run(self) -> None:
        while not (self._stopping and self._waiting.empty()):
            try:
                future = self._waiting.get(timeout=LATE_S if self._watching else None)
            except queue.Empty:
                future = None
            if future is not None:
                future.complete()
                del future
            self._look_at_late()
        for since, late in list(self._late):
            late.complete_if_ended(time.monotonic() - since)

    def _look_at_late(self) -> None:
        """Never blocks for an operation in flight."""
        now = time.monotonic()
        with self._lock:
            self._watching = bool(self._late)
            due = []
            while self._late and now - self._late[0][0] >= LATE_S:
                due.append(self._late.popleft())
        for since, future in due:
            if not future.complete_if_ended(now - since):
                with self._lock:
                    self._late.append((since, future))


_completer = _Completer()


def end() -> None:
    """The last group is closed: its operations have ended, and the thread ends with them."""
    global _completer
    ended, _completer = _completer, _Completer()
    ended.stop()


def future_of(work: Ending) -> Any:
    """A future of what the work will have written."""
    if not _asked_by_cpp():
        future = OperationFuture(work)
        _completer.add(future)
        return future
    if work.drive(DRIVE_S) and work.exception() is None:
        return completed(work.result())
    future = OperationFuture(work)
    # A failed future of Python's has a value, for C++; what is chained to it fails.
    ended: Any = torch.futures.Future.then(future, _check)
    _kept.append(ended)
    typed = _compiled().typed(ended, work.result())
    # In a backward pass, and in none of its last callbacks.
    if _current_graph_task_id() >= 0 and _context.path is None:
        Variable._execution_engine.queue_callback(future.complete)
        _completer.add_late(future)
    else:
        _completer.add(future)
    return typed


def finish_alone(work: Ending) -> OperationFuture:
    """Ends the work in the completing thread, also where nobody waits for it."""
    future = OperationFuture(work)
    _completer.add(future)
    return future


def completed(tensors: list[Tensor]) -> Any:
    """A future of a list of tensors, for Python and C++, that has ended."""
    if tensors:
        return torch._C.fork(lambda: tensors)
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result([])
    return future


def _check(future: Any) -> int:
    future.value()
    return 0


def _asked_by_cpp() -> bool:
    """Whether a work's `get_future` was called by C++ (DDP), and not by a line of Python."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "get_future" and frame.f_back is not None:
        frame = frame.f_back
    return "get_future" not in frame.f_code.co_names


@functools.cache
def _compiled() -> Any:
    return torch.jit.CompilationUnit(_TYPED)


def _after_fork_in_child() -> None:
    global _completer
    _completer = _Completer()


os.register_at_fork(after_in_child=_after_fork_in_child)
