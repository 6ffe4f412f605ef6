"""load_state_dict of a model with shared parameters: it writes once per host.

Each module with shared tensors, and the model itself, has a hook before and one after its loading.
The first hook that a call of load_state_dict reaches is a barrier: from there on no rank reads the
parameters. On all but the lowest rank of a host the hooks replace the values that would be copied
by the parameters themselves, and what is copied onto itself is not written. When that first module
is loaded, the ranks exchange what went wrong: so all have waited for the writing ranks, and what
fails on one of them raises on all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from hvdlite.collectives.barrier import barrier
from hvdlite.collectives.objects import gather_results
from hvdlite.errors import HorovodInternalError
from hvdlite.shared import check
from hvdlite.shared.memory import place_of
from hvdlite.world import world
from hvdlite.world.teams.process_sets import global_process_set

# The stall check and the errors about ranks that have left print it.
_WHAT = "load_state_dict (shared parameters: on every rank)"


@dataclass
class _Load:
    """A call of load_state_dict.

    module: the first of the model's modules that has hooks. errors: the list in which the call
    gathers its errors, which tells calls apart. permission: to write, until it is closed.
    """

    module: torch.nn.Module
    errors: list[str]
    permission: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


# The one that is under way. One that was broken off by an exception stays until the next.
_loads: list[_Load] = []


def add_hooks(model: torch.nn.Module) -> None:
    """Makes `load_state_dict` of the model, and of each of its modules, write once per host. A
    second call changes nothing."""
    for module in model.modules():
        if module is model or _has_shared(module):
            hooks = module._load_state_dict_pre_hooks.values()
            if not any(getattr(hook, "hook", None) is _before_module for hook in hooks):
                # The public name is missing in torch 2.4.
                module._register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
                    _before_module, with_module=True
                )
                module.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
                    _after_module
                )


def _has_shared(module: torch.nn.Module) -> bool:
    return any(True for _ in _shared(module))


def _shared(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The module's own tensors that are shared, with their names in it."""
    for members in (module._parameters, module._buffers):
        for name, tensor in members.items():
            if tensor is not None and place_of(tensor) is not None:
                yield name, tensor


def _before_module(
    module: torch.nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Runs when a module, before its children, takes its values out of `state_dict`."""
    if world.active is None:
        return
    is_first = not _loads or _loads[-1].errors is not error_msgs
    if is_first and not any(map(_has_shared, module.modules())):
        return  # its tensors have got other memory, or it is a copy
    if local_metadata.get("assign_to_params_buffers"):
        raise ValueError(
            "load_state_dict(assign=True) would give the parameters other memory, and "
            "share_parameters has placed them into shared memory; leave out assign=True, or call "
            "share_parameters after it"
        )
    if is_first:
        _loads[:] = [_Load(module, error_msgs)]
        _meet()
        _loads[-1].permission.enter_context(check.writing("load_state_dict"))
    if world.local_rank() != 0:
        for name, tensor in _shared(module):
            value = state_dict.get(prefix + name)
            if isinstance(value, torch.Tensor) and _fits(value, tensor):
                state_dict[prefix + name] = tensor.detach()


def _meet() -> None:
    """Blocks until every rank is in load_state_dict."""
    try:
        barrier(name=f"hvdlite.{_WHAT}")
    except HorovodInternalError as error:
        raise HorovodInternalError(
            "load_state_dict: the model's parameters are shared, so every rank calls it, as the "
            "others must not read them meanwhile. Where only rank 0 has the values, load them "
            "before share_parameters, or call model.load_state_dict(hvd.broadcast_object(state)) "
            f"on every rank. {error}"
        ) from error


def _fits(value: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether torch would copy the value, and not report an error."""
    # Files of torch 0.3 have scalars as vectors.
    return value.shape == tensor.shape or (value.shape == (1,) and tensor.shape == ())


def _after_module(module: torch.nn.Module, incompatible_keys: Any) -> None:
    """Runs when a module has got its values, and its children theirs."""
    if not _loads or _loads[-1].module is not module:
        return
    load = _loads.pop()
    keys = (tuple(incompatible_keys.missing_keys), tuple(incompatible_keys.unexpected_keys))

    def outcome() -> tuple[list[str], tuple[tuple[str, ...], tuple[str, ...]]]:
        return list(load.errors), keys

    outcomes = gather_results(
        "load_state_dict", outcome, f"hvdlite.{_WHAT}.end", global_process_set
    )
    load.permission.close()
    for rank, (errors, _) in enumerate(outcomes):
        load.errors += [f"rank {rank}: {text}" for text in errors if text not in load.errors]
    for rank, (_, other) in enumerate(outcomes):
        if other != outcomes[0][1]:
            load.errors.append(
                f"rank {rank} has loaded other keys than rank 0: {_keys(other)} instead of "
                f"{_keys(outcomes[0][1])}; load the same state dict on every rank"
            )
            break


def _keys(keys: tuple[tuple[str, ...], tuple[str, ...]]) -> str:
    missing, unexpected = (", ".join(map(repr, part[:3])) or "none" for part in keys)
    return f"missing {missing}, unexpected {unexpected}"
