"""What is said where a backward pass brings a gradient that is in this step's reduction already."""

from __future__ import annotations

from hvdlite.optimizer.buckets.slot import Slot


def reached_again(slot: Slot, passes_per_step: int) -> RuntimeError:
    """slot: that of the gradient. passes_per_step: the number of backward passes per round."""
    if slot.has_come():
        return RuntimeError(
            f"the gradient of {slot.name!r} came twice in one reduction, because of reentrant "
            "checkpoints; pass use_reentrant=False to torch.utils.checkpoint.checkpoint"
        )
    if passes_per_step > 1:
        return RuntimeError(
            f"backward() reached {slot.name!r}, whose gradient is already reduced in this "
            f"step: backward_passes_per_step={passes_per_step} reduces after every "
            f"{passes_per_step} backward passes that reach a parameter of this optimizer, "
            "and this one is one more before step(). Pass the number of all backward passes "
            "before a step (two losses of one network are two), or call step() and zero_grad() "
            "before; passes that should not count belong into no_sync()"
        )
    return RuntimeError(
        f"backward() reached {slot.name!r}, whose gradient is already reduced in this step. "
        "To accumulate gradients over several backward passes, pass backward_passes_per_step "
        "to DistributedOptimizer, or run all but the last inside no_sync(); to start over, "
        "call the optimizer's zero_grad()"
    )
