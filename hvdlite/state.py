"""Gives all ranks the same state: parameters and an optimizer's state."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvdlite.asynchronous.optimizer_methods import AsyncMethods
from hvdlite.collectives.barrier import barrier
from hvdlite.collectives.broadcast import broadcast_async_, checked_root
from hvdlite.collectives.differing_ranks import ranks_in_words
from hvdlite.collectives.handles import Handle, synchronize
from hvdlite.collectives.objects import gather_results, send_object
from hvdlite.collectives.posting import internal, require_memory
from hvdlite.errors import HorovodInternalError
from hvdlite.ops import DTYPES
from hvdlite.optimizer import parameter_order
from hvdlite.optimizer.adasum import DeltaOptimizer
from hvdlite.optimizer.overlap import in_flight
from hvdlite.optimizer.sharding.optimizer import ShardedOptimizer
from hvdlite.shared import check
from hvdlite.shared.broadcasting import (
    Passed,
    Shared,
    chunks,
    is_sent,
    is_shared_somewhere,
    problem_with,
    scratch_chunks,
    writes,
)
from hvdlite.tensor_bytes import flat_bytes
from hvdlite.world import world
from hvdlite.world.teams.process_sets import ProcessSet, global_process_set, team_of
from hvdlite.world.teams.team import Team

Named = Mapping[str, Any] | Iterable[tuple[str, Any]] | Iterable[torch.Tensor]


def broadcast_parameters(
    params: Named, root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrites the tensors with those of rank `root_rank`, in place. Blocks.

    Every rank passes the same names with tensors of the same shape and dtype. Any dtype of torch
    works, and so do non-contiguous and expanded tensors and lazily conjugated or negated views.
    Shared ones (`share_parameters`) are written once per host.

    Args:
        params: A state dict; or a list or an iterator of `(name, tensor)`, such as
            `model.named_parameters()`; or a list of tensors. A None among them is skipped.
        root_rank: The rank whose values all get.
        process_set: The ranks that take part.

    Raises:
        ValueError: Something is no tensor, or not a dense one with its own memory; the text names
            it. Nothing is sent then.
        HorovodInternalError: The ranks' tensors differ; on every rank. Or another rank has raised a
            ValueError, or an error of its iterator; the text names the rank.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    """
    _broadcast_parameters("broadcast_parameters", params, root_rank, process_set)


def _broadcast_parameters(
    function: str, params: Named, root_rank: int, process_set: ProcessSet
) -> None:
    """function: what the user has called."""
    team = team_of(function, process_set)
    # With its name, or its number where it has none.
    tensors: list[tuple[str | int, torch.Tensor]] = []

    def look() -> tuple[int, dict[str | int, Shared]]:
        checked_root(function, root_rank, team, process_set)
        for index, (name, tensor) in enumerate(_pairs(function, params)):
            if tensor is not None:
                in_flight.wait_for([tensor])
                tensors.append(
                    (index if name is None else str(name), _memory_of(function, name, tensor))
                )
        found = {key: Shared.of(memory) for key, memory in tensors}
        shared = {key: shared for key, shared in found.items() if shared is not None}
        return zlib.crc32(repr([key for key, _ in tensors]).encode()), shared

    # When this returns, no rank computes with its tensors any more.
    looked = gather_results(function, look, None, process_set)
    if any(keys != looked[0][0] for keys, _ in looked):
        own = [key for key, _ in tensors]
        by_member = gather_results(function, lambda: own, None, process_set)
        raise HorovodInternalError(f"{function}: {_different_keys(by_member, team.ranks)}")
    passed = [shared for _, shared in looked]
    if not any(passed):
        _broadcast(function, tensors, passed, team, root_rank, process_set)
        return
    if problem := problem_with(passed, team.ranks):
        raise HorovodInternalError(f"{function}: {problem}")
    with check.writing(function, process_set):
        _broadcast(function, tensors, passed, team, root_rank, process_set)
        # None goes on before the memory of its host is written.
        barrier(process_set, internal(function, None, process_set))


def _different_keys(by_member: Sequence[Sequence[str | int]], ranks: Sequence[int]) -> str:
    """by_member: the names of its tensors, or their numbers; not all have the same."""
    for key in dict.fromkeys(key for keys in by_member for key in keys):
        lacking = [rank for rank, keys in zip(ranks, by_member, strict=True) if key not in keys]
        if lacking:
            what = repr(key) if isinstance(key, str) else f"tensor {key}"
            verb = "do" if len(lacking) > 1 else "does"
            return (
                f"{ranks_in_words(lacking)} {verb} not pass {what}, which other ranks pass; pass "
                "the same names on every rank"
            )
    return "the ranks pass the same names in another order; pass them in the same order"


def _broadcast(
    function: str,
    tensors: Sequence[tuple[str | int, torch.Tensor]],
    passed: Passed,
    team: Team,
    root_rank: int,
    process_set: ProcessSet,
) -> None:
    """passed: the members' shared tensors."""
    started: list[Handle] = []
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    root = team.ranks.index(root_rank)
    for key, memory in tensors:
        is_shared = is_shared_somewhere(passed, key)
        if is_shared and not is_sent(passed, key):
            continue
        if writes(passed, key, team.rank, root):
            place = memory.resolve_conj().resolve_neg().contiguous()
            if place is not memory:
                copies.append((memory, place))
            wire = _known_dtype(place)
            parts = chunks(wire) if is_shared else [wire]
        else:
            one = _known_dtype(torch.empty(1, dtype=memory.dtype, device="cpu"))
            parts = scratch_chunks(one.dtype, one.numel() * memory.numel())
        for number, part in enumerate(parts):
            name = f"{function}.{key}" + (f".chunk {number}" if number else "")
            started.append(broadcast_async_(part, root_rank, name, process_set))
    for handle in started:
        synchronize(handle)
    for memory, place in copies:
        memory.copy_(place)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Gives every rank the state and the options of rank `root_rank`'s optimizer. Blocks.

    Also works if only the root has state, for instance from a checkpoint. The state has the root's
    dtypes and types on every rank, on the devices where `load_state_dict` puts it.

    Args:
        optimizer: The same class over the same parameters on every rank; distributed or not.
            Parameters match by name if all have one (`torch.optim.SGD(model.named_parameters())`,
            or those given to DistributedOptimizer), else by order.
        root_rank: The rank whose state all get.
        model: Accepted for Horovod's sake; not needed.
        process_set: The ranks that take part.

    Raises:
        ValueError: LBFGS, whose state is a history that can't be shared; an optimizer whose state
            is divided among the ranks.
        HorovodInternalError: The optimizers' parameters differ in names, groups or shapes; on every
            rank. Or another rank has raised a ValueError, or an error of the root's `state_dict`;
            the text names the rank.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    """
    is_root = world.rank() == root_rank
    tensors: list[torch.Tensor] = []
    frame: Any = None

    def look() -> list[parameter_order.Described]:
        nonlocal frame
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("broadcast_optimizer_state does not support LBFGS")
        if isinstance(optimizer, ShardedOptimizer):
            raise ValueError(
                "broadcast_optimizer_state: the state of this optimizer is divided among the ranks "
                "(shard=..., or shared parameters), so no rank has it all; to load what one rank "
                "has read, call optimizer.load_state_dict(hvd.broadcast_object(state_dict)) on "
                "every rank"
            )
        if is_root:
            frame = _without_tensors(optimizer.state_dict(), tensors)
        return parameter_order.described(optimizer)

    function = "broadcast_optimizer_state"
    everyones = gather_results(function, look, None, process_set)
    team = team_of(function, process_set)
    parameter_order.require_same(function, everyones, team.ranks)
    frame = send_object(function, frame, root_rank, None, process_set)
    if not is_root:
        frame = _with_tensors(frame, tensors)
    named = [(f"state.{i}", tensor) for i, tensor in enumerate(tensors)]
    _broadcast_parameters(function, named, root_rank, process_set)
    if not is_root:
        theirs = everyones[team.ranks.index(root_rank)]
        _load(optimizer, parameter_order.in_order_of(everyones[team.rank], theirs, frame))


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


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """`load_state_dict`, after which the state is exactly what was given, where one rank has it all
    (`_load`). Every rank calls it."""
    if isinstance(optimizer, (ShardedOptimizer, AsyncMethods)):
        optimizer.load_state_dict(state)
    else:
        _load(optimizer, state)


def is_of_rank(thing: Any) -> bool:
    """Whether it is an optimizer of whose state each rank has its own, with op=Adasum."""
    return isinstance(thing, DeltaOptimizer)


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


def _pairs(function: str, params: Named) -> Iterable[tuple[str | None, Any]]:
    if isinstance(params, Mapping):
        # Sorted: two ranks may have filled their dicts in different orders.
        return sorted(params.items(), key=lambda item: str(item[0]))
    if isinstance(params, (str, torch.Tensor)) or not isinstance(params, Iterable):
        raise ValueError(
            f"{function}: expected a state dict or (name, tensor) pairs, got "
            f"{type(params).__name__}"
        )
    return [p if isinstance(p, tuple) else (None, p) for p in params]


def _memory_of(function: str, name: str | None, tensor: Any) -> torch.Tensor:
    """The tensor without autograd, and without the repeats of `expand`, which can't be written to.

    Raises:
        ValueError: It is not a tensor whose values are in its memory.
    """
    form = f"{function}: {name!r}"
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
    return flat_bytes(tensor)
