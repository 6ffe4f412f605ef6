"""Any Python objects: broadcast and gathered, by cloudpickle; and the results of functions that may
raise on some of the ranks."""

from __future__ import annotations

import io
import pickle
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import torch

from hvdlite.collectives.allgather import allgather_async
from hvdlite.collectives.broadcast import broadcast_, broadcast_async_, checked_root
from hvdlite.collectives.handles import Handle, rows_of, synchronize
from hvdlite.collectives.posting import internal
from hvdlite.errors import HorovodInternalError
from hvdlite.world import world
from hvdlite.world.teams.process_sets import ProcessSet, global_process_set, team_of

Thing = TypeVar("Thing")


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Gives every rank the object of rank `root_rank`: a copy, on the root the object itself.

    Every rank calls it. Blocks. The object travels by cloudpickle, so functions and classes of
    `__main__` work too.

    Args:
        obj: Anything that can be pickled; only the root's counts.
        root_rank: A rank of the world, also in a process set.
        name: As for `allreduce`.
        process_set: The ranks that take part.

    Raises:
        ValueError: No such rank.
        HorovodInternalError: The ranks' operations do not match; on every rank. Or the root's
            object can't be pickled; the root itself raises pickle's error.

    Example:
        >>> hvd.broadcast_object({"epoch": 3} if hvd.rank() == 0 else None, root_rank=0)
        {'epoch': 3}
    """
    return send_object("broadcast_object", obj, root_rank, name, process_set)


def send_object(
    function: str, obj: Any, root_rank: int, name: str | None, process_set: ProcessSet
) -> Any:
    """`broadcast_object`, called by `function`, which the user has called."""
    checked_root(function, root_rank, team_of(function, process_set), process_set)
    is_root = world.rank() == root_rank
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    payload, failure = _sendable(obj) if is_root else (nothing, None)
    size_bytes = torch.tensor([payload.numel()], dtype=torch.int64, device="cpu")
    name = internal(function, name, process_set)
    size_name = type(name)(f"{name}.size")
    if failure is not None:
        started = [
            broadcast_async_(size_bytes, root_rank, size_name, process_set),
            broadcast_async_(payload, root_rank, name, process_set),
        ]
        _leave(started, failure)
    broadcast_(size_bytes, root_rank, size_name, process_set)
    if not is_root:
        payload = torch.empty(int(size_bytes), dtype=torch.uint8, device="cpu")
    broadcast_(payload, root_rank, name, process_set)
    return obj if is_root else _unpickled(function, payload, root_rank)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Gives every rank the objects of all ranks, by rank; each a copy. Blocks.

    Every rank calls it.

    Args:
        obj: Anything that can be pickled.
        name: As for `allreduce`.
        process_set: The ranks that take part.

    Raises:
        HorovodInternalError: The ranks' operations do not match; on every rank. Or a rank's object
            can't be pickled; that rank itself raises pickle's error.

    Example:
        With two ranks:

        >>> hvd.allgather_object(f"rank {hvd.rank()}")
        ['rank 0', 'rank 1']
    """
    payload, failure = _sendable(obj)
    return _everyones_objects("allgather_object", payload, failure, name, process_set)


def gather_results(
    operation: str, make: Callable[[], Thing], name: str | None, process_set: ProcessSet
) -> list[Thing]:
    """What `make` returns on each member, in their order. Collective; blocks.

    For functions that check their arguments before they communicate: if a check fails on one rank,
    the others must not wait for it.

    make: may raise anything; what it returns is copied by pickle.

    Raises:
        HorovodInternalError: It has raised on another rank; the text names the first such rank. On
            a rank where it raises, its own exception.
    """
    given, failure = attempt(operation, make)
    payload = torch.frombuffer(bytearray(pickle.dumps(given)), dtype=torch.uint8)
    return _everyones_objects(operation, payload, failure, name, process_set)


def attempt(operation: str, make: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """What `make` returns, to be sent to the other ranks, and None. If it raises: an object that
    makes `unwrap` raise on the other ranks, and the exception, which this rank must raise after it
    has sent the object."""
    try:
        return make(), None
    except BaseException as error:
        return _Failure(f"{operation} failed on rank {world.rank()}: ", error), error


def unwrap(thing: Any) -> Any:
    """The result of another rank's `attempt`.

    Raises:
        HorovodInternalError: It has raised on that rank.
    """
    if isinstance(thing, _Failure):
        raise HorovodInternalError(thing.text)
    return thing


def _everyones_objects(
    operation: str,
    payload: torch.Tensor,
    failure: BaseException | None,
    name: str | None,
    process_set: ProcessSet,
) -> list[Any]:
    """failure: this rank's own, of which the payload tells the others."""
    handle = allgather_async(payload, internal(operation, name, process_set), process_set)
    if failure is not None:
        _leave([handle], failure)
    parts = torch.split(synchronize(handle), list(rows_of(handle)))
    ranks = team_of(operation, process_set).ranks
    return [_unpickled(operation, part, rank) for part, rank in zip(parts, ranks, strict=True)]


class _Failure:
    """Sent to the other ranks instead of an object, so that they don't wait for one."""

    def __init__(self, where: str, error: BaseException) -> None:
        # As at the end of a traceback, which also works if the exception's own __str__ raises.
        self.text = where + "".join(traceback.format_exception_only(error)).strip()


def _leave(started: Sequence[Handle], failure: BaseException) -> NoReturn:
    """Raises this rank's own failure, after the operations that send it to the other ranks."""
    # An interrupted rank does not wait: the others may have been interrupted before they get here.
    if isinstance(failure, Exception):
        for handle in started:
            synchronize(handle)
    raise failure


def _sendable(obj: Any) -> tuple[torch.Tensor, BaseException | None]:
    """The pickled object and None; or a failure to send instead, and the exception to raise."""
    import cloudpickle

    failure = None
    buffer = io.BytesIO()
    try:
        cloudpickle.dump(obj, buffer)
    except BaseException as error:
        failure = error
        buffer = io.BytesIO()
        pickle.dump(_Failure(f"rank {world.rank()}'s object can't be sent: ", error), buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8), failure


def _unpickled(operation: str, payload: torch.Tensor, rank: int) -> Any:
    return unwrap(pickle.loads(payload.numpy().data))
