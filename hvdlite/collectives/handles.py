"""Handles of asynchronous operations, and waiting for them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hvdlite.errors import HorovodInternalError
from hvdlite.observe import waits
from hvdlite.world.telling import last_line


class Waitable(Protocol):
    """A handle waits for this: an operation of the engine, a transfer on a GPU, or several."""

    def poll(self) -> bool: ...

    def wait(self) -> str | None: ...

    def label(self) -> tuple[str, str]:
        """The kind's name, and the operation's."""


class Handle:
    """A collective that was started; pass it to `poll` or `synchronize`.

    The engine keeps the tensors until the operation has ended, even if the handle is dropped.
    """

    __slots__ = ("_finish", "_finishing", "_made", "_result", "operation")

    def __init__(
        self, operation: Waitable, result: Any = None, finish: Callable[[], Any] | None = None
    ) -> None:
        self.operation = operation
        self._result = result
        # Makes the result after the operation has ended; None if it exists already.
        self._finish = finish
        if finish is not None:
            # Held by the thread that makes the result; reentrant, as a signal handler may wait too.
            self._finishing = threading.RLock()
            # The result. If a signal handler made one meanwhile, the first one counts.
            self._made: list[Any] = []

    def result(self) -> Any:
        """Call it after the operation has succeeded. One thread makes the result; the others wait
        for it."""
        if self._finish is not None:
            with self._finishing:
                finish = self._finish
                try:
                    if finish is not None and not self._made:
                        self._made.append(finish())
                except Exception as error:
                    if not self._made:
                        # Every later caller gets this error too: the result is half made.
                        self._finish = functools.partial(_raise, error)
                        raise
                self._result, self._finish = self._made[0], None
        return self._result


class Several:
    """Operations that share one handle. The first one finds disagreements: if it fails, the others
    may never end, as other ranks may not have posted them."""

    __slots__ = ("operations",)

    def __init__(self, operations: Sequence[Any]) -> None:
        self.operations = operations

    def poll(self) -> bool:
        for operation in self.operations:
            if not operation.poll():
                return False
            if operation.wait() is not None:
                return True
        return True

    def label(self) -> tuple[str, str]:
        """That of the first operation, which has the group's name."""
        return self.operations[0].label() if self.operations else ("group", "unnamed.")

    def drive(self, limit_s: float) -> bool:
        """Waits for each for at most so long; whether all have ended."""
        return all(operation.drive(limit_s) for operation in self.operations)

    def wait(self, timeout_s: float | None = None) -> str | None:
        """timeout_s: for each, where they take one."""
        for operation in self.operations:
            failure: str | None = (
                operation.wait() if timeout_s is None else operation.wait(timeout_s)
            )
            if failure is not None:
                return failure
        return None


def poll(handle: Handle) -> bool:
    """Whether the operation has ended, so that `synchronize` would return at once. Never blocks.

    Raises:
        ValueError: `handle` was not returned by an asynchronous operation.

    Example:
        >>> handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum)
        >>> while not hvd.poll(handle):
        ...     pass  # compute something
        >>> hvd.synchronize(handle)
        tensor([2., 2.])
    """
    if handle.__class__ is not Handle:
        raise _not_a_handle(handle)
    return waits.has_ended(handle.operation)


def synchronize(handle: Handle) -> Any:
    """Waits for an asynchronous operation and returns its result: the same each time, in every
    thread that waits.

    Args:
        handle: The return value of an `_async` function.

    Returns:
        A tensor; for a grouped operation the list of its tensors; for `alltoall_async` the tensor
        and the received splits.

    Raises:
        HorovodInternalError: The operation failed, on every rank that takes part.
        ValueError: `handle` was not returned by an asynchronous operation.

    Example:
        On rank 0 of 2:

        >>> handles = [hvd.allreduce_async(torch.ones(1), name=name) for name in ("a", "b")]
        >>> [hvd.synchronize(handle) for handle in handles]
        [tensor([1.]), tensor([1.])]
    """
    if handle.__class__ is not Handle:
        raise _not_a_handle(handle)
    last_line.look()
    if waits.observed():
        with waits.waiting(handle.operation):
            failure = handle.operation.wait()
    else:
        failure = handle.operation.wait()
    if failure is not None:
        raise HorovodInternalError(failure)
    return handle._result if handle._finish is None else handle.result()


def rows_of(handle: Handle) -> tuple[int, ...]:
    """The rows that came from each member, after an allgather or alltoall has ended."""
    operation: Any = handle.operation
    return operation.rows()  # type: ignore[no-any-return]


def _raise(error: Exception) -> Any:
    raise error


def _not_a_handle(thing: object) -> ValueError:
    return ValueError(
        f"expected a handle that an asynchronous operation returned, got {type(thing).__name__}"
    )
