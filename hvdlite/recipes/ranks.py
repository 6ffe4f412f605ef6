"""What one rank does alone, or before the others.

The practice of every script on several ranks, `if hvd.rank() == 0`, with the two things that are
easily forgotten: the others may need the result, and they must learn of a failure.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, overload

from hvdlite.collectives.objects import attempt, gather_results, send_object, unwrap
from hvdlite.world import world
from hvdlite.world.teams.process_sets import ProcessSet, global_process_set, team_of

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class OnOneRank(Protocol):
    """A decorator whose functions return None on the other ranks."""

    def __call__(
        self, function: Callable[Arguments, Result], /
    ) -> Callable[Arguments, Result | None]: ...


class OnAllRanks(Protocol):
    """A decorator whose functions return the same on every rank."""

    def __call__(self, function: Callable[Arguments, Result], /) -> Callable[Arguments, Result]: ...


@overload
def only_rank(
    rank: int = 0,
    *,
    wait: bool = False,
    broadcast: Literal[False] = False,
    process_set: ProcessSet = ...,
) -> OnOneRank: ...


@overload
def only_rank(
    rank: int = 0,
    *,
    wait: bool = False,
    broadcast: Literal[True],
    process_set: ProcessSet = ...,
) -> OnAllRanks: ...


def only_rank(
    rank: int = 0,
    *,
    wait: bool = False,
    broadcast: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """A decorator: the function runs on this rank only, and returns None on the others.

    Without `wait` and `broadcast` any rank may call the function, nothing is sent, and the other
    ranks go on at once. With one of them every rank of the process set calls it, it blocks until
    the function has returned on its rank, and a failure there is an error on every rank. The
    function itself must call no collective.

    Args:
        rank: A rank of the world, also with a process set.
        wait: The other ranks go on when the function has returned, for instance to read a file that
            it has written.
        broadcast: All ranks get the function's result; the others a copy, by cloudpickle.
        process_set: The ranks that wait or get the result; `rank` is one of them.

    Raises:
        ValueError: When the function is called: there is no such rank.
        HorovodInternalError: With `wait` or `broadcast`, on the other ranks: the function has
            raised; the text has its name and the exception. On its rank, that exception.

    Example:
        On rank 0 of 2:

        >>> from hvdlite.recipes import only_rank
        >>> @only_rank(0, broadcast=True)
        ... def vocabulary():
        ...     return sorted({"b", "a"})
        >>> vocabulary()
        ['a', 'b']
    """
    if not isinstance(rank, int):
        raise ValueError(
            f"only_rank: rank={rank!r} is {type(rank).__name__}, expected an int; "
            "a decorator is written @only_rank(0)"
        )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        name = f"{function.__qualname__} (only_rank({rank}))"

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            is_chosen = world.rank() == rank
            if not (wait or broadcast):
                _check(name, rank, range(world.size()))
                return function(*args, **kwargs) if is_chosen else None
            _check(name, rank, team_of("only_rank", process_set).ranks)

            def run() -> Any:
                result = function(*args, **kwargs)
                # Not sent if nobody wants it: it may be large, or impossible to pickle.
                return result if broadcast else kept.append(result)

            kept: list[Any] = []
            result = _run_and_tell(name, run if is_chosen else None, rank, process_set)
            return kept[0] if kept else result

        return call

    return decorate


def _run_and_tell(
    name: str, run: Callable[[], Any] | None, rank: int, process_set: ProcessSet
) -> Any:
    """What `run` returns on its rank, on every rank. run: None on the other ranks."""
    if run is None:
        return unwrap(send_object(name, None, rank, None, process_set))
    result, failure = attempt(name, run)
    if failure is not None and not isinstance(failure, Exception):
        # An interrupted rank does not wait for others, which may have been interrupted too.
        raise failure
    send_object(name, result, rank, None, process_set)
    if failure is not None:
        raise failure
    return result


@contextlib.contextmanager
def rank_first(
    rank: int = 0, *, per_host: bool = False, process_set: ProcessSet = global_process_set
) -> Iterator[None]:
    """A context: this rank runs the block, and then all others do.

    Use it when one rank prepares something for the others: it downloads or unpacks a data set, and
    they find it. Every rank of the process set enters it. The others block until the first has left
    the block; that is one allgather. The block itself must call no collective.

    Args:
        rank: A rank of the world; with `per_host`, a local rank.
        per_host: That rank of each host is first, for hosts with their own disks.
        process_set: The ranks that take part; `rank` is one of them.

    Raises:
        ValueError: There is no such rank.
        HorovodInternalError: On the other ranks: the block has raised on the first. On that rank,
            its exception.

    Example:
        >>> from hvdlite.recipes import rank_first
        >>> with rank_first():
        ...     data = "downloaded by rank 0, found by the others"
    """
    name = f"rank_first({rank}{', per_host=True' if per_host else ''})"
    if per_host:
        is_first = world.local_rank() == rank
        _check(name, rank, range(world.local_size()))
    else:
        is_first = world.rank() == rank
        _check(name, rank, team_of("rank_first", process_set).ranks)
    if not is_first:
        gather_results(name, _nothing, None, process_set)
        yield
        return
    try:
        yield
    except Exception as error:
        gather_results(name, functools.partial(_raise, error), None, process_set)
    else:
        gather_results(name, _nothing, None, process_set)


def rank_zero_print(*values: Any, **options: Any) -> None:
    """`print` on rank 0; nothing on the others. Any rank may call it, alone too.

    Takes the arguments of `print`, and flushes by default, so that the lines appear in order among
    those of the other ranks.

    Example:
        >>> from hvdlite.recipes import rank_zero_print
        >>> rank_zero_print("epoch", 1)
        epoch 1
    """
    if world.rank() == 0:
        print(*values, **{"flush": True, **options})


def _check(name: str, rank: int, ranks: range | tuple[int, ...]) -> None:
    if rank not in ranks:
        raise ValueError(f"{name}: there is no rank {rank} among the ranks {list(ranks)}")


def _nothing() -> None:
    pass


def _raise(error: Exception) -> None:
    raise error
