"""State that all ranks should have alike: parameters, an optimizer's state, any Python object."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hvdlite import world
from hvdlite.blocking import broadcast_
from hvdlite.collectives import (
    Handle,
    allgather_async,
    broadcast_async_,
    rows_of,
    synchronize,
)
from hvdlite.ops import DTYPES
from hvdlite.process_sets import ProcessSet, global_process_set

Named = Mapping[str, Any] | Iterable[tuple[str, Any]] | Iterable[torch.Tensor]


def broadcast_parameters(
    params: Named, root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrites the tensors with those of rank `root_rank`, in place. Blocks.

    Every rank passes the same names with tensors of the same shape and dtype; any dtype that torch
    has, also non-contiguous.

    Args:
        params: A state dict; or a list or an iterator of `(name, tensor)`, as
            `model.named_parameters()`; or a list of tensors. None among them is skipped.
        root_rank: Whose values count.
        process_set: The ranks that take part.

    Raises:
        ValueError: Something else than tensors; the text names it.
        HorovodInternalError: The ranks' tensors differ; on every rank.
    """
    started: list[tuple[Handle, torch.Tensor, torch.Tensor]] = []
    for name, tensor in _pairs(params):
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"broadcast_parameters: {name!r} is {type(tensor).__name__}, expected a tensor; "
                "use broadcast_optimizer_state or broadcast_object"
            )
        place = tensor.detach().contiguous()
        label = None if name is None else f"broadcast_parameters.{name}"
        handle = broadcast_async_(_known_dtype(place), root_rank, label, process_set)
        started.append((handle, place, tensor))
    with torch.no_grad():
        for handle, place, tensor in started:
            synchronize(handle)
            if not tensor.is_contiguous():
                tensor.copy_(place)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Gives every rank's optimizer the state and the options of that of rank `root_rank`. Blocks.

    Works also where only the root has state, since it alone has loaded a checkpoint.

    Args:
        optimizer: The same class over the same parameters on every rank; distributed or not.
        root_rank: Whose state counts.
        model: Accepted for Horovod's sake; not needed.

    Raises:
        ValueError: LBFGS, whose state is a history that can't be shared.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("broadcast_optimizer_state does not support LBFGS")
    is_root = world.rank() == root_rank
    tensors: list[torch.Tensor] = []
    frame = _without_tensors(optimizer.state_dict(), tensors) if is_root else None
    frame = broadcast_object(frame, root_rank)
    if not is_root:
        frame = _with_tensors(frame, tensors)
    broadcast_parameters([(f"state.{i}", tensor) for i, tensor in enumerate(tensors)], root_rank)
    if not is_root:
        optimizer.load_state_dict(frame)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The object of rank `root_rank` on every rank: a copy, on the root the object itself. Blocks.

    It travels by cloudpickle, so that functions and classes of `__main__` do too.

    Raises:
        ValueError: No such rank.
        HorovodInternalError: The ranks' operations do not match; on every rank.
    """
    is_root = world.rank() == root_rank
    payload = _dumps(obj) if is_root else torch.empty(0, dtype=torch.uint8, device="cpu")
    size_bytes = torch.tensor([payload.numel()], dtype=torch.int64, device="cpu")
    broadcast_(size_bytes, root_rank, name and f"{name}.size", process_set)
    if not is_root:
        payload = torch.empty(int(size_bytes), dtype=torch.uint8, device="cpu")
    broadcast_(payload, root_rank, name, process_set)
    return obj if is_root else _loads(payload)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The objects of all ranks, by rank, on every rank; each a copy. Blocks.

    Raises:
        HorovodInternalError: The ranks' operations do not match; on every rank.
    """
    handle = allgather_async(_dumps(obj), name, process_set)
    everyones = synchronize(handle)
    assert everyones is not None
    parts = torch.split(everyones, list(rows_of(handle)))
    return [_loads(part) for part in parts]


@dataclass(frozen=True)
class _TensorPlace:
    """Stands for a tensor where the rest of a state dict is pickled."""

    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def _without_tensors(thing: Any, tensors: list[torch.Tensor]) -> Any:
    """A copy of nested containers in which places stand for the tensors, which are appended
    to `tensors` (in host memory, as other ranks need not have the same devices)."""
    if isinstance(thing, torch.Tensor):
        tensors.append(thing.detach().cpu().contiguous())
        return _TensorPlace(len(tensors) - 1, tuple(thing.shape), thing.dtype)
    if isinstance(thing, dict):
        return {key: _without_tensors(value, tensors) for key, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        copies = [_without_tensors(item, tensors) for item in thing]
        return copies if isinstance(thing, list) else tuple(copies)
    return thing


def _with_tensors(thing: Any, tensors: list[torch.Tensor]) -> Any:
    """The inverse; the tensors are new ones, in the order of their indices."""
    if isinstance(thing, _TensorPlace):
        assert thing.index == len(tensors)
        tensors.append(torch.empty(thing.shape, dtype=thing.dtype, device="cpu"))
        return tensors[-1]
    if isinstance(thing, dict):
        return {key: _with_tensors(value, tensors) for key, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        copies = [_with_tensors(item, tensors) for item in thing]
        return copies if isinstance(thing, list) else tuple(copies)
    return thing


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


def _known_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, contiguous, with a dtype that collectives know."""
    if tensor.dtype in DTYPES:
        return tensor
    if tensor.dtype.is_complex:
        return torch.view_as_real(tensor)
    return tensor.reshape(-1).view(torch.uint8)


def _dumps(obj: Any) -> torch.Tensor:
    import cloudpickle

    buffer = io.BytesIO()
    cloudpickle.dump(obj, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def _loads(payload: torch.Tensor) -> Any:
    return pickle.loads(payload.numpy().data)
