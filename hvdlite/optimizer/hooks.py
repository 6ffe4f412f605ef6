"""The hooks on a parameter."""

from __future__ import annotations

from collections.abc import Callable

from hvdlite.optimizer.buckets.slot import Slot


def hook(slot: Slot) -> Callable[[], None] | None:
    """Installs the hook and returns the function that removes it; None if the parameter can't have
    a gradient."""
    param = slot.param
    if not (param.is_floating_point() or param.is_complex()):
        return None
    frozen = not param.requires_grad
    # torch refuses a hook on a frozen parameter, but keeps the hook of one that is frozen later.
    if frozen:
        param.requires_grad_(True)
    try:
        handle = param.register_post_accumulate_grad_hook(slot.arrive)  # type: ignore[no-untyped-call]
    finally:
        if frozen:
            param.requires_grad_(False)
    return handle.remove  # type: ignore[no-any-return]


def remove_hooks(slot: Slot) -> None:
    if slot.unhook is not None:
        slot.unhook()
        slot.unhook = None
    if slot.weigher is not None:
        slot.weigher[1].remove()
        slot.weigher = None
