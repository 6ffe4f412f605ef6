"""What an asynchronous operation returns, and waiting for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hvdlite.errors import HorovodInternalError


class Waitable(Protocol):
    """What a handle waits for: an operation of the engine, one on a GPU, or several of them."""

    def poll(self) -> bool: ...

    def wait(self) -> str | None: ...


class Handle:
    """A collective that was started: for `poll` and `synchronize`, and nothing else.

    The engine keeps the tensors until the operation has ended, also where the handle is dropped.
    """

    __slots__ = ("_finish", "_result", "operation")

    def __init__(
        self, operation: Waitable, result: Any = None, finish: Callable[[], Any] | None = None
    ) -> None:
        self.operation = operation
        self._result = result
        # Makes the result when the operation has ended; None where it is there already.
        self._finish = finish


class Several:
    """Operations that are one to their handle. The first is the one that finds disagreements: where
    it fails the others may never end, as other ranks need not have them."""

    __slots__ = ("_ended", "_operations")

    def __init__(
        self, operations: Sequence[Waitable], ended: Callable[[], None] | None = None
    ) -> None:
        """ended: called once, when this has been waited for."""
        self._operations = operations
        self._ended = ended

    def poll(self) -> bool:
        for operation in self._operations:
            if not operation.poll():
                return False
            if operation.wait() is not None:
                return True
        return True

    def wait(self) -> str | None:
        failure = None
        for operation in self._operations:
            failure = operation.wait()
            if failure is not None:
                break
        ended, self._ended = self._ended, None
        if ended is not None:
            ended()
        return failure


def together(handles: Sequence[Handle], ended: Callable[[], None] | None) -> Handle:
    """One handle for several, whose result is the list of theirs. ended: see `Several`."""
    return Handle(
        Several([handle.operation for handle in handles], ended),
        finish=lambda: [synchronize(handle) for handle in handles],
    )


def poll(handle: Handle) -> bool:
    """Whether the operation has ended, so that `synchronize` would return at once. Never blocks.

    Raises:
        ValueError: `handle` was not returned by an asynchronous operation.
    """
    if handle.__class__ is not Handle:
        raise _not_a_handle(handle)
    return handle.operation.poll()


def synchronize(handle: Handle) -> Any:
    """Waits for an asynchronous operation, and returns its result (the same one each time).

    Returns:
        A tensor; of a grouped operation the list of its tensors; of `alltoall_async` the tensor and
        the received splits; of a barrier None.

    Raises:
        HorovodInternalError: The operation failed, on every rank that takes part.
        ValueError: `handle` was not returned by an asynchronous operation.
    """
    if handle.__class__ is not Handle:
        raise _not_a_handle(handle)
    failure = handle.operation.wait()
    if failure is not None:
        raise HorovodInternalError(failure)
    if handle._finish is not None:
        handle._result = handle._finish()
        handle._finish = None
    return handle._result


def rows_of(handle: Handle) -> tuple[int, ...]:
    """Of an allgather or an alltoall that has ended: the rows that came from each member."""
    operation: Any = handle.operation
    return operation.rows()  # type: ignore[no-any-return]


def _not_a_handle(thing: object) -> ValueError:
    return ValueError(
        f"expected a handle that an asynchronous operation returned, got {type(thing).__name__}"
    )
