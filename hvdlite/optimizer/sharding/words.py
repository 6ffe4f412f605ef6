"""Texts of errors about sharded optimizers."""

from __future__ import annotations

from hvdlite.optimizer.buckets.slot import Slot


def mixed_forms(slot: Slot) -> str:
    return (
        f"DistributedOptimizer: the gradient of {slot.name!r} is sparse on some ranks and dense on "
        "others, and with shard no rank has all of the dense one; pass sparse_as_dense=True, or "
        "make its gradient sparse (or dense) on every rank"
    )


JOINED = (
    "DistributedOptimizer: a rank has called hvd.join(), so nobody updates the part of the "
    "parameters that it owns; where ranks have parts (shard, or share_parameters), every rank "
    "must run as many steps as the others: give all the same number of batches, as "
    "torch.utils.data.DistributedSampler does"
)


NOTHING_REDUCED = (
    "optimizer.step() inside skip_synchronize(), but nothing was reduced in this step: a "
    "sharded optimizer has no gradients of its own to go by; call optimizer.synchronize() "
    "first, on every rank"
)


INTERRUPTED = (
    "optimizer.step(): an exception has ended the last step() on this rank. The other ranks "
    "have ended that step with what this rank had updated by then, so this rank can't repeat "
    "it alone, and its part of the parameters may lack the update. Call zero_grad() to go on. "
    "If the step was interrupted on some ranks only, the next backward() is an error on all of "
    "them: load a checkpoint there, of the model and the optimizer, on every rank"
)


def closure_of_whole(kind: str) -> str:
    return (
        f"step(closure) of {kind} with parameters that are dealt out to the ranks: each rank "
        "updates only its own inside the step, so the closure would read the others' old values; "
        f"run forward and backward before step(), or, if {kind} computes each element by itself "
        "and calls its closure once, first, set hvdlite_elementwise = True in its class"
    )


def shared_too_late(name: str) -> str:
    return (
        f"optimizer.step(): parameter {name!r} is shared by the ranks of this host, but was not "
        "when DistributedOptimizer was made, so every rank would update it; call "
        "hvd.share_parameters(model) before hvd.DistributedOptimizer"
    )
