"""What an operation of a process group returns: c10d's Work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from hvdlite.distributed import futures
from hvdlite.distributed.errors import CollectiveError, OperationTimeoutError
from hvdlite.observe import waits
from hvdlite.world.telling import last_line

Tensor = torch.Tensor

_NO_TIMEOUT = timedelta(0)


class _Work(Work):
    """What all have in common."""

    __slots__ = ("_future", "_lock", "_span", "timeout_s")

    def __init__(self, timeout_s: float, span: Callable[[], None] | None) -> None:
        super().__init__()
        self.timeout_s = timeout_s
        self._span = span
        self._future: Any = None
        self._lock = threading.RLock()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Any:
        """A future of the list of written tensors; the same each time. Its callbacks run in one
        thread, in the order of the calls, so that all ranks run them alike."""
        with self._lock:
            if self._future is None:
                self._future = futures.future_of(self)
            return self._future

    def _end_span(self) -> None:
        with self._lock:
            span, self._span = self._span, None
        if span is not None:
            span()


class OperationWork(_Work):
    """One operation of the engine.

    finish: moves the result to where the caller wants it, if it is not there; called once, by the
        thread that first sees the end.
    """

    __slots__ = ("_done", "_ending", "_error", "_finish", "_group", "_operation", "_outputs")

    def __init__(
        self,
        group: Any,
        operation: Any,
        outputs: list[Tensor],
        finish: Callable[[Any], None] | None,
        timeout_s: float,
        span: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(timeout_s, span)
        self._group = group
        self._operation = operation
        self._outputs = outputs
        self._finish = finish
        self._done = False
        self._ending: Any = None
        self._error: BaseException | None = None

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Blocks until it has ended.

        Raises:
            CollectiveError: It failed, on every member.
            OperationTimeoutError: It did not end in time. With a timeout of its own it may still
                end well; after the group's, everything of the group fails.
        """
        if not self._done:
            if self._span is not None:
                # As with torch's own backends, another thread ends the span.
                self.end_alone()
            own = timeout != _NO_TIMEOUT
            limit_s = timeout.total_seconds() if own else self.timeout_s
            self._await(limit_s, own)
        if self._span is not None:
            self.end_alone().wait_for_thread()
        if self._error is not None:
            raise self._error
        return True

    def _await(self, limit_s: float, own: bool) -> None:
        last_line.look()
        try:
            with waits.counting():
                failure = self._operation.wait(limit_s)
        except TimeoutError as error:
            if own:
                raise OperationTimeoutError(f"Operation timed out! {error}") from None
            raise self._group.overdue(error) from None
        self._end(failure)

    def name(self) -> str:
        """What the operation is posted as."""
        return str(self._operation.label()[1])

    def end_alone(self) -> Any:
        """Has the futures' thread end it. Apart from `get_future`, as C++ may call that later."""
        with self._lock:
            if self._ending is None:
                self._ending = futures.finish_alone(self)
            return self._ending

    def settle(self) -> None:
        """Waits, without raising what went wrong: `exception` tells."""
        if not self._done:
            try:
                self._await(self.timeout_s, False)
            except OperationTimeoutError as error:
                with self._lock:
                    self._error, self._done = error, True
        self._end_span()

    def _end(self, failure: str | None) -> None:
        with self._lock:
            if self._done:
                return
            if failure is not None:
                self._error = CollectiveError(failure)
            elif self._finish is not None:
                try:
                    self._finish(self._operation)
                except Exception as error:
                    self._error = error
            self._finish = None
            self._done = True

    def is_completed(self) -> bool:
        if not self._done and waits.has_ended(self._operation):
            self._end(self._operation.wait())
        return self._done

    def drive(self, limit_s: float) -> bool:
        """Waits for at most so long; whether it has ended."""
        return self._done or (self._operation.drive(limit_s) and self.is_completed())

    def exception(self) -> BaseException | None:
        return self._error if self.is_completed() else None

    def result(self) -> list[Tensor]:
        """The tensors that the operation has written."""
        return self._outputs


class SeveralWork(_Work):
    """Several operations that were started by one call."""

    __slots__ = ("_ending", "_works")

    def __init__(self, works: Sequence[Any], span: Callable[[], None] | None = None) -> None:
        super().__init__(max((work.timeout_s for work in works), default=0.0), span)
        self._works = works
        # Ends the span, in another thread.
        self._ending = None if span is None else futures.finish_alone(self)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        for work in self._works:
            work.wait(timeout)
        if self._ending is not None:
            self._ending.wait_for_thread()
        return True

    def name(self) -> str:
        return str(self._works[0].name()) if self._works else "none"

    def settle(self) -> None:
        for work in self._works:
            work.settle()
        self._end_span()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def drive(self, limit_s: float) -> bool:
        return all(work.drive(limit_s) for work in self._works)

    def exception(self) -> BaseException | None:
        found = (work.exception() for work in self._works)
        return next((error for error in found if error is not None), None)

    def result(self) -> list[Tensor]:
        return [tensor for work in self._works for tensor in work.result()]


class Done(SeveralWork):
    """An operation that has ended well before its call returned."""

    __slots__ = ()

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        return True

    def get_future(self) -> Any:
        return futures.completed([])


DONE = Done(())
