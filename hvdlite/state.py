"""Gives all ranks the same state: parameters, an optimizer's state, any Python object."""

from __future__ import annotations

import copy
import io
import pickle
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch

from hvdlite.collectives.allgather import allgather_async
from hvdlite.collectives.broadcast import broadcast_, broadcast_async_, checked_root
from hvdlite.collectives.handles import Handle, rows_of, synchronize
from hvdlite.collectives.posting import require_memory
from hvdlite.errors import HorovodInternalError
from hvdlite.ops import DTYPES
from hvdlite.world import world
from hvdlite.world.process_sets import ProcessSet, global_process_set, team_of

Thing = TypeVar("Thing")

Named = Mapping[str, Any] | Iterable[tuple[str, Any]] | Iterable[torch.Tensor]


def broadcast_parameters(
    params: Named, root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrites the tensors with those of rank `root_rank`, in place. Blocks.

    Every rank passes the same names with tensors of the same shape and dtype; any dtype that torch
    has, also non-contiguous, expanded, or a lazily conjugated or negated view.

    Args:
        params: A state dict; or a list or an iterator of `(name, tensor)`, as
            `model.named_parameters()`; or a list of tensors. None among them is skipped.
        root_rank: Whose values count.
        process_set: The ranks that take part.

    Raises:
        ValueError: Something else than tensors, or than dense ones that have their memory; the text
            names it. Nothing is sent then.
        HorovodInternalError: The ranks' tensors differ; on every rank. Or another rank has raised,
            a ValueError or what its iterator raises; the text names the rank.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    """
    team = team_of("broadcast_parameters", process_set)
    places: list[tuple[str | None, torch.Tensor, torch.Tensor]] = []

    def look() -> None:
        checked_root("broadcast_parameters", root_rank, team, process_set)
        for name, tensor in _pairs(params):
            if tensor is not None:
                memory = _memory_of(name, tensor)
                place = memory.resolve_conj().resolve_neg().contiguous()
                places.append((name, place, memory))

    gather_results("broadcast_parameters", look, None, process_set)
    started: list[Handle] = []
    for name, place, _ in places:
        label = None if name is None else f"broadcast_parameters.{name}"
        started.append(broadcast_async_(_known_dtype(place), root_rank, label, process_set))
    for handle, (_, place, memory) in zip(started, places, strict=True):
        synchronize(handle)
        if place is not memory:
            memory.copy_(place)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Gives every rank's optimizer the state and the options of that of rank `root_rank`. Blocks.

    Works also where only the root has state, since it alone has loaded a checkpoint. The state has
    the root's dtypes and types on every rank, on the devices where `load_state_dict` puts it.

    Args:
        optimizer: The same class over the same parameters on every rank; distributed or not.
        root_rank: Whose state counts.
        model: Accepted for Horovod's sake; not needed.
        process_set: The ranks that take part.

    Raises:
        ValueError: LBFGS, whose state is a history that can't be shared.
        HorovodInternalError: Another rank has raised, a ValueError or what the root's `state_dict`
            raises; the text names the rank.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    """
    is_root = world.rank() == root_rank
    tensors: list[torch.Tensor] = []
    frame: Any = None

    def look() -> None:
        nonlocal frame
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("broadcast_optimizer_state does not support LBFGS")
        if is_root:
            frame = _without_tensors(optimizer.state_dict(), tensors)

    gather_results("broadcast_optimizer_state", look, None, process_set)
    frame = broadcast_object(frame, root_rank, process_set=process_set)
    if not is_root:
        frame = _with_tensors(frame, tensors)
    named = [(f"state.{i}", tensor) for i, tensor in enumerate(tensors)]
    broadcast_parameters(named, root_rank, process_set)
    if not is_root:
        _load(optimizer, frame)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Gives every rank the object of rank `root_rank`: a copy, on the root the object itself.

    Every rank calls it. Blocks. The object travels by cloudpickle, so that functions and classes of
    `__main__` do too.

    Args:
        obj: Anything that can be pickled; what other ranks than the root pass does not count.
        root_rank: A rank of the world, also in a process set.
        name: As for `allreduce`.
        process_set: The ranks that take part.

    Raises:
        ValueError: No such rank.
        HorovodInternalError: The ranks' operations do not match; on every rank. Or the root's
            object can't be pickled, and there this is raised as pickle raises it.

    Example:
        >>> hvd.broadcast_object({"epoch": 3} if hvd.rank() == 0 else None, root_rank=0)
        {'epoch': 3}
    """
    is_root = world.rank() == root_rank
    payload, failure = _sendable(obj) if is_root else (_nothing(), None)
    size_bytes = torch.tensor([payload.numel()], dtype=torch.int64, device="cpu")
    size_name = name and f"{name}.size"
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
    return obj if is_root else _unpickled("broadcast_object", payload, root_rank)


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
            can't be pickled, and there this is raised as pickle raises it.

    Example:
        With two ranks:

        >>> hvd.allgather_object(f"rank {hvd.rank()}")
        ['rank 0', 'rank 1']
    """
    payload, failure = _sendable(obj)
    handle = allgather_async(payload, name, process_set)
    if failure is not None:
        _leave([handle], failure)
    return _everyones_objects("allgather_object", handle, process_set)


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
    handle = allgather_async(payload, name, process_set)
    if failure is not None:
        _leave([handle], failure)
    return _everyones_objects(operation, handle, process_set)


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


def _everyones_objects(operation: str, handle: Handle, process_set: ProcessSet) -> list[Any]:
    parts = torch.split(synchronize(handle), list(rows_of(handle)))
    ranks = team_of(operation, process_set).ranks
    return [_unpickled(operation, part, rank) for part, rank in zip(parts, ranks, strict=True)]


@dataclass(frozen=True)
class _TensorPlace:
    """Stands for a tensor where the rest of a state dict is pickled."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def _without_tensors(thing: Any, tensors: list[torch.Tensor]) -> Any:
    """A copy of nested containers with a _TensorPlace for each tensor. Appends the tensors to
    `tensors`, in host memory, as other ranks need not have the same devices."""
    if isinstance(thing, torch.Tensor):
        require_memory("broadcast_optimizer_state", thing)
        tensors.append(thing.detach().cpu().contiguous())
        return _TensorPlace(len(tensors) - 1, tuple(thing.shape), thing.dtype)
    if isinstance(thing, dict):
        copies = {key: _without_tensors(value, tensors) for key, value in thing.items()}
        return _of_its_type(thing, copies)
    if isinstance(thing, (list, tuple)):
        return _of_its_type(thing, [_without_tensors(item, tensors) for item in thing])
    return thing


def _with_tensors(thing: Any, tensors: list[torch.Tensor]) -> Any:
    """The inverse: appends new, empty tensors to `tensors`, in the order of their indices."""
    if isinstance(thing, _TensorPlace):
        assert thing.index == len(tensors)
        tensors.append(torch.empty(thing.shape, dtype=thing.dtype, device="cpu"))
        return tensors[-1]
    if isinstance(thing, dict):
        copies = {key: _with_tensors(value, tensors) for key, value in thing.items()}
        return _of_its_type(thing, copies)
    if isinstance(thing, (list, tuple)):
        return _of_its_type(thing, [_with_tensors(item, tensors) for item in thing])
    return thing


def _of_its_type(container: Any, items: Any) -> Any:
    """A container as this one, a namedtuple or a defaultdict for instance, with other items."""
    if isinstance(container, tuple):
        make = getattr(container, "_make", type(container))
        return make(items)
    copied = copy.copy(container)
    if isinstance(container, dict):
        for key, value in items.items():  # as a Counter's update adds
            copied[key] = value
    else:
        copied[:] = items
    return copied


def _load(optimizer: torch.optim.Optimizer, frame: dict[str, Any]) -> None:
    """`load_state_dict`, after which the state is exactly what was given.

    By itself it casts floating-point state to the parameter's dtype, and makes all that is iterable
    anew from a generator, which namedtuples and strings do not survive.
    """
    saved = frame.get("state")
    if not isinstance(saved, dict) or "param_groups" not in frame:
        # The user's own way of saving, and of loading.
        optimizer.load_state_dict(frame)
        return
    optimizer.load_state_dict({**frame, "state": _loadable(saved)})
    ids = [key for group in frame["param_groups"] for key in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    owners: dict[Any, Any] = dict(zip(ids, params, strict=True))
    state: dict[Any, Any] = optimizer.state
    for key, wanted in saved.items():
        owner = owners.get(key, key)
        if owner in state:
            state[owner] = _as_saved(wanted, state[owner])


def _loadable(thing: Any) -> Any:
    """A copy in plain containers; replaces iterables that are neither tensors nor containers by
    None."""
    if isinstance(thing, torch.Tensor):
        return thing
    if isinstance(thing, dict):
        return {key: _loadable(value) for key, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [_loadable(item) for item in thing]
    return None if isinstance(thing, Iterable) else thing


def _as_saved(saved: Any, loaded: Any) -> Any:
    """The saved object, with its tensors on the devices of the loaded ones."""
    if isinstance(saved, torch.Tensor):
        return saved.to(loaded.device) if isinstance(loaded, torch.Tensor) else saved
    if isinstance(saved, dict) and isinstance(loaded, dict):
        items = {key: _as_saved(value, loaded.get(key)) for key, value in saved.items()}
        return _of_its_type(saved, items)
    if isinstance(saved, (list, tuple)) and isinstance(loaded, (list, tuple)):
        pairs = zip(saved, loaded, strict=True)
        return _of_its_type(saved, [_as_saved(item, other) for item, other in pairs])
    return saved


def _pairs(params: Named) -> Iterable[tuple[str | None, Any]]:
    if isinstance(params, Mapping):
        # Sorted: two ranks may have filled their dicts in different orders.
        return sorted(params.items(), key=lambda item: str(item[0]))
    if isinstance(params, (str, torch.Tensor)) or not isinstance(params, Iterable):
        raise ValueError(
            f"broadcast_parameters: expected a state dict or (name, tensor) pairs, got "
            f"{type(params).__name__}"
        )
    return [p if isinstance(p, tuple) else (None, p) for p in params]


def _memory_of(name: str | None, tensor: Any) -> torch.Tensor:
    """The tensor without autograd, and without the repeats of `expand`, which can't be written to.

    Raises:
        ValueError: It is not a tensor whose values are in its memory.
    """
    form = f"broadcast_parameters: {name!r}"
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(
            f"{form} is {type(tensor).__name__}, expected a tensor; use broadcast_optimizer_state "
            "or broadcast_object"
        )
    require_memory(form, tensor)
    if tensor.is_quantized:  # its scale lies elsewhere
        raise ValueError(f"{form} is quantized; use broadcast_object, or dequantize() it")
    memory = tensor.detach()
    for dim, (size, stride) in enumerate(zip(memory.shape, memory.stride(), strict=True)):
        if size > 1 and stride == 0:
            memory = memory.narrow(dim, 0, 1)
    return memory


def _known_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, contiguous, with a dtype that collectives know."""
    if tensor.dtype in DTYPES:
        return tensor
    if tensor.dtype.is_complex:
        return torch.view_as_real(tensor)
    return tensor.reshape(-1).view(torch.uint8)


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


def _nothing() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu")


def _unpickled(operation: str, payload: torch.Tensor, rank: int) -> Any:
    return unwrap(pickle.loads(payload.numpy().data))
