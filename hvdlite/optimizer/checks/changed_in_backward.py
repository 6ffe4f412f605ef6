"""What is said where a hook of the script makes steps while backward runs, with gradients that are
not reduced yet: then each rank would train alone."""

from __future__ import annotations

from hvdlite.optimizer.buckets.slot import Slot


def changed_in_words(slot: Slot) -> str:
    """slot: whose parameter was changed while backward ran, or whose gradient was removed."""
    what = f"the gradient of {slot.name!r} was removed"
    if slot.param.grad is not None:
        what = f"{slot.name!r} was changed"
    return (
        f"DistributedOptimizer: {what} while backward() ran, before the ranks' gradients were "
        "averaged, as by a hook of register_post_accumulate_grad_hook that makes an "
        "optimizer's step: each rank would train alone. Remove that hook and call step() after "
        "backward(); or, for steps within backward(), make one DistributedOptimizer per "
        "parameter, then register hooks that call its step() and zero_grad()"
    )
