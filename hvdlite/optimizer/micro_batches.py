"""The micro-batches of a step where its bits do not depend on the number of ranks
(HVDLITE_DETERMINISTIC=virtual:V): each is one backward pass of this rank.

After each backward but the last one, the gradients leave `.grad` for the stacks of their buckets
(`hvdlite.optimizer.buckets.tree_bucket`), since autograd would add up one after the other. The last
backward runs a round, as every communicating one does. Where each rank has one micro-batch, rounds
are as without virtual ranks; only what would make the bits depend on the number of ranks is
refused there, too.

A micro-batch that has not reached a parameter counts with +0 if another one, of any rank, has: so
does a rank that lacks a gradient. Adding +0 changes nothing but the sign of a -0.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from hvdlite.compression import Compression
from hvdlite.ops import Adasum
from hvdlite.optimizer.buckets.bucket import Combining
from hvdlite.optimizer.buckets.slot import Slot
from hvdlite.optimizer.buckets.tree_bucket import TreeBucket
from hvdlite.optimizer.gradients import Gradients
from hvdlite.shared import is_shared
from hvdlite.world import world
from hvdlite.world.teams.process_sets import ProcessSet, included
from hvdlite.world.virtual_ranks import micro_batches


class MicroBatches:
    """Those of one optimizer on this rank. Without virtual ranks it does nothing."""

    def __init__(self, gradients: Gradients) -> None:
        self._gradients = gradients
        # What the backward pass that runs has reached, of those that end without a round.
        self._reached: list[Slot] = []
        # Why no step can be made of what has come; empty if one can.
        self._spoiled = ""
        # The buckets into which the first micro-batch of the step has gone.
        self._generation = -1

    @property
    def number(self) -> int:
        """Of the micro-batches of a step on this rank; 0 without virtual ranks."""
        return self._gradients.micro_batches

    def begin(self, index: int, first: Slot, raised: bool, reduced: bool) -> None:
        """A backward pass has begun. index: that of its micro-batch. first: whose gradient it has
        brought. raised: the one before it has raised. reduced: this step's gradients are.

        Raises:
            RuntimeError: Its gradients can't be added to those of the step.
        """
        if not self.number:
            return
        if raised:
            self._spoiled = "a backward() of this step has raised"
        generation = self._gradients.generation
        if not index:
            self._generation = generation
        elif self._generation != generation:
            self._spoiled = "the optimizer's parameters have changed since its first backward()"
        self.require_unspoiled()
        if not index and not reduced:
            self._require_none_left(first)
        self._reached.clear()

    def _require_none_left(self, first: Slot) -> None:
        """Raises RuntimeError if gradients of the last step are still there: they would count once
        on each rank."""
        for slot in self._gradients.slots:
            grad = slot.param.grad
            if slot is not first and grad is not None and bool(grad.detach().any()):
                raise RuntimeError(
                    f"the gradient of {slot.name!r} is still there from before the first "
                    "micro-batch of this step, and would count once on each rank "
                    f"({_variable()}); call zero_grad() before a step's first backward()"
                )

    def note(self, slot: Slot, grad: torch.Tensor, has_round: bool) -> None:
        """A backward pass has brought a gradient. has_round: it ends with a round.

        Raises:
            ValueError: The gradient can't be added up along the tree.
        """
        if not self.number:
            return
        unfit = "is sparse; make it dense (sparse=False)" if grad.is_sparse else ""
        if grad.requires_grad:
            unfit = "has a graph (create_graph=True); use torch.autograd.grad for its gradients"
        if unfit:
            raise ValueError(
                f"the gradient of {slot.name!r} {unfit}, or leave virtual ranks out ({_variable()})"
            )
        if not has_round:
            self._reached.append(slot)

    def end(self, index: int) -> None:
        """A backward pass without a round has ended: its gradients leave `.grad`."""
        if not self.number:
            return
        reached = set(map(id, self._reached))
        for bucket in self._gradients.buckets:
            assert isinstance(bucket, TreeBucket)
            for slot in bucket.slots:
                grad = None
                if id(slot) in reached:
                    grad, slot.param.grad = slot.param.grad, None
                    # A hook of the script may keep it, and write the next micro-batch's there.
                    if grad is not None and grad is not slot.view and sys.getrefcount(grad) > 2:
                        grad = grad.clone()
                bucket.add(slot, index, grad)
        self._reached.clear()

    def forget(self) -> None:
        """The step's gradients are reduced, or given up."""
        self._spoiled = ""
        self._reached.clear()
        for bucket in self._gradients.buckets:
            if isinstance(bucket, TreeBucket):
                bucket.forget()

    def spoil(self) -> None:
        """A round has ended without a result."""
        if self.number:
            self._spoiled = "the reduction of this step's gradients has failed"

    def require_unspoiled(self) -> None:
        """Raises RuntimeError if no step can be made of what has come."""
        if self._spoiled:
            raise RuntimeError(
                f"{self._spoiled}, so what has come is not the sum of its micro-batches; call the "
                f"optimizer's zero_grad(), and run all {self.number} of this rank's again"
            )

    def require_all(self, passes: int) -> None:
        """Before `step` or `synchronize` reduces. passes: those that have ended.

        Raises:
            RuntimeError: Some of the micro-batches are missing.
        """
        if not self.number:
            return
        self.require_unspoiled()
        if 0 < passes < self.number:
            raise RuntimeError(
                f"step after {passes} of {self.number} micro-batches: with {_variable()} every "
                f"rank runs hvd.virtual_micro_batches() = {self.number} backward passes that reach "
                "a parameter of the optimizer before a step, without a zero_grad() between them"
            )

    def require_reduced(self, communicated: bool) -> None:
        """Raises RuntimeError if a step would be made with gradients that are not reduced."""
        if self.number and not communicated:
            raise RuntimeError(
                "step() inside skip_synchronize() before this step's gradients are reduced, where "
                f"a rank has none of its own ({_variable()}); call optimizer.synchronize() before"
            )

    def require_of_backward(self, slot: Slot, grad: torch.Tensor) -> None:
        """Before a gradient counts that no backward pass has brought: raises RuntimeError if the
        script has set it."""
        if self.number and bool(grad.detach().any()):
            raise RuntimeError(
                f"the gradient of {slot.name!r} was set by the script, and so belongs to no "
                f"micro-batch ({_variable()}); leave virtual ranks out"
            )

    def require_first_round(self, slot: Slot) -> None:
        """Raises RuntimeError: a backward pass has reached what is reduced already."""
        if self.number:
            raise RuntimeError(
                f"backward() reached {slot.name!r}, whose gradient is already reduced in this "
                f"step of hvd.virtual_micro_batches() = {self.number} backward passes on each rank "
                f"({_variable()}); call step() and zero_grad() after these"
            )

    def refuse(self, what: str, instead: str) -> None:
        """Raises ValueError with virtual ranks."""
        if self.number:
            raise ValueError(f"{what} does not go with {_variable()}: {instead}")

    def require_passes(self, passes: int) -> None:
        """Raises ValueError if a step has another number of backward passes."""
        if self.number and passes != self.number:
            raise ValueError(_other_passes(passes, self.number))


def require_possible(
    params: Sequence[torch.Tensor],
    process_set: ProcessSet,
    combining: Combining,
    passes: int,
    sparse_as_dense: bool,
    shard: bool | str,
) -> None:
    """Raises ValueError if DistributedOptimizer's arguments do not go with virtual ranks."""
    included("DistributedOptimizer", process_set)
    config = world.current().config
    if not config.virtual_ranks:
        return
    assert process_set.ranks is not None
    number = micro_batches(config, len(process_set.ranks))
    if passes not in (1, number):
        raise ValueError(_other_passes(passes, number))
    unfit = {
        "op=Adasum": combining.op is Adasum,
        "compression": combining.compression is not Compression.none,
        "gradient_predivide_factor": combining.predivide != 1.0,
        "sparse_as_dense=True": sparse_as_dense,
        f"shard={shard!r}": bool(shard),
        "an optimizer of shared parameters": any(map(is_shared, params)),
    }
    for what, is_given in unfit.items():
        if is_given:
            raise ValueError(
                f"DistributedOptimizer: {what} does not go with {_variable()}, which adds up dense "
                "gradients in host memory as they are; leave one of the two out"
            )


def _other_passes(passes: int, number: int) -> str:
    return (
        f"backward_passes_per_step={passes}, but {_variable()} makes a step of {number} backward "
        "passes on each of so many ranks; leave backward_passes_per_step out"
    )


def _variable() -> str:
    return f"HVDLITE_DETERMINISTIC={world.current().config.deterministic}"
