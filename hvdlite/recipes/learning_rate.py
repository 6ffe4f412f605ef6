"""Learning rates of large batches: the linear scaling rule and gradual warm-up.

From Goyal et al., 2017, "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour": with a batch
k times as large, multiply the learning rate by k (section 2.1), and come to that rate in equal
steps over the first five epochs (section 2.2). The square root for Adam follows Malladi et al.,
2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms"; that Adasum needs no
scaling, Maleki et al., 2020, "Scaling Distributed Training with Adaptive Summation".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch.optim.lr_scheduler import LRScheduler

from hvdlite.ops import Adasum, Average, ReduceOp, Sum
from hvdlite.recipes.momentum_correction import correct_momentum
from hvdlite.world.teams.process_sets import ProcessSet, global_process_set, included


def scale_lr(
    lr: float,
    *,
    rule: Literal["linear", "sqrt"] = "linear",
    op: ReduceOp = Average,
    backward_passes_per_step: int = 1,
    loss_divided: bool | None = None,
    batch: int | None = None,
    base_batch: int | None = None,
    process_set: ProcessSet = global_process_set,
) -> float:
    """The learning rate of n ranks, from that of one process.

    Any rank may call it, alone too; nothing is sent.

    A step of n ranks with k backward passes each covers G = n·k times as many samples. The rule
    multiplies the rate for their *mean* gradient by G, or √G. The optimizer may get more than the
    mean: with `Sum`, n times it; if the script does not divide its loss by k, k times it, because
    gradients of backward passes add up. SGD's steps are then already that much longer, and the
    linear rule's factor is that much smaller:

    ======= ======== =============
    op      loss / k loss as it is
    ======= ======== =============
    Average n·k      n
    Sum     k        1
    Adasum  k        1
    ======= ======== =============

    With `optimizer.set_weight` the optimizer gets the mean over all passes, although the script
    does not divide its loss: pass `loss_divided=True`.

    Adasum combines the steps of all ranks, within hosts too, so their number does not scale the
    rate (Horovod multiplies by the local size where NCCL averages within hosts; hvdlite does not).
    `rule="sqrt"` is for Adam and its relatives, whose steps do not depend on the size of the
    gradient: the factor is √G in the whole table, and √k with Adasum.

    Args:
        lr: The learning rate that is right for one process.
        rule: "linear" for SGD, with momentum or without; "sqrt" for Adam, AdamW and the like.
        op: That of `DistributedOptimizer`.
        backward_passes_per_step: k, that of `DistributedOptimizer`.
        loss_divided: Whether the script divides the loss of each backward pass by k, or weighs it
            with `set_weight`. Must be given if k > 1.
        batch: The samples of a backward pass on one rank, if not those for which `lr` is right.
        base_batch: The samples of the batch for which `lr` is right, for example 256.
        process_set: That of `DistributedOptimizer`.

    Raises:
        ValueError: A bad argument; k > 1 without `loss_divided`; only one of the batches; not
            initialized.

    Example:
        On two ranks:

        >>> from hvdlite.recipes import scale_lr
        >>> scale_lr(0.1)
        0.2
        >>> scale_lr(0.1, batch=512, base_batch=256, backward_passes_per_step=2, loss_divided=True)
        0.8
    """
    passes = backward_passes_per_step
    if not isinstance(passes, int) or passes < 1:
        raise ValueError(f"scale_lr: backward_passes_per_step={passes}, expected at least 1")
    if rule not in ("linear", "sqrt"):
        raise ValueError(f"scale_lr: rule={rule!r}, expected 'linear' or 'sqrt'")
    if op not in (Average, Sum, Adasum):
        raise ValueError(f"scale_lr: op={op!r}, expected Average, Sum or Adasum")
    if passes > 1 and loss_divided is None:
        raise ValueError(
            f"scale_lr: backward_passes_per_step={passes} adds up {passes} gradients; pass "
            f"loss_divided=True if the script divides its loss by {passes}, or loss_divided=False"
        )
    if (batch is None) != (base_batch is None):
        raise ValueError("scale_lr: batch and base_batch are given together, or neither")
    if batch is not None and base_batch is not None and min(batch, base_batch) < 1:
        raise ValueError(f"scale_lr: batch={batch}, base_batch={base_batch}, expected at least 1")
    # Of the mean gradient of how many base batches the rate must be right, and how many times that
    # mean the optimizer gets.
    samples = 1.0 if op is Adasum else _members(process_set)
    scale = samples if op is Sum else 1.0
    samples *= passes if batch is None or base_batch is None else passes * batch / base_batch
    scale *= 1.0 if loss_divided else passes
    return lr * (math.sqrt(samples) if rule == "sqrt" else samples / scale)


def _members(process_set: ProcessSet) -> float:
    """How many ranks average with this one; a rank that is no member trains alone."""
    return process_set.size() or 1 if included("scale_lr", process_set) else 1


# By so much schedulers that multiply may miss a product, in float32 and over thousands of steps.
_ROUNDING = 1e-3


class GradualWarmup(LRScheduler):
    """Raises the learning rate in equal steps from `start_lr` to that of the optimizer.

    The optimizer is made with the scaled rate, at which the warm-up ends:
    lr(t) = start + (lr - start)·t / steps, for t = 0, 1, … calls of `step()`, and exactly lr from
    t = steps on. After that the scheduler leaves the rate alone.

    In `SequentialLR` any next scheduler takes over at the milestone. In `ChainedScheduler`, or side
    by side, the warm-up keeps the factors of schedulers that *multiply* the rate: `StepLR`,
    `MultiStepLR`, `ConstantLR`, `LinearLR`, `ExponentialLR`, `PolynomialLR`, `CosineAnnealingLR`
    with eta_min=0, `ReduceLROnPlateau`. Those that *set* the rate, whatever it was, do not work
    there: `LambdaLR`, `CosineAnnealingWarmRestarts`, `CyclicLR`, `OneCycleLR`. A step that finds
    the rate above the warm-up's raises an error. 0 stays 0 when it is multiplied: with start_lr=0,
    make and step the others after this one.

    Its `state_dict()`, with the optimizer's, resumes a warm-up bit for bit.

    Nothing is sent: every rank makes and steps its own.

    Args:
        optimizer: Any `torch.optim.Optimizer`, before or after `DistributedOptimizer` wraps it.
        start_lr: The first rate, mostly that of one process; a sequence has one for each parameter
            group.
        steps: How many calls of `step()` the warm-up takes.
        epochs: In place of `steps`: its length in epochs, not necessarily a whole number.
        steps_per_epoch: With `epochs`: the calls of `step()` in an epoch, `len(loader)`, divided by
            `backward_passes_per_step` if `step()` is called once per step of the optimizer. 1 (the
            default) if it is called once per epoch.
        momentum_correction: Calls `correct_momentum`, for optimizers whose momentum buffers contain
            the learning rate. Those of PyTorch don't.
        last_epoch: As for PyTorch's schedulers: t - 1 to go on at t, with the optimizer's state
            loaded.

    Raises:
        ValueError: Neither or both of `steps` and `epochs`; a start rate below 0 or above the
            optimizer's, or another number of them than groups; `momentum_correction` with an
            optimizer that needs none.
        RuntimeError: When `step` is called, until the warm-up ends: something has raised the rate,
            not multiplied it; the optimizer has got another parameter group.

    Example:
        On two ranks:

        >>> from hvdlite.recipes import GradualWarmup, scale_lr
        >>> model = torch.nn.Linear(1, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=scale_lr(0.1))
        >>> warmup = GradualWarmup(optimizer, start_lr=0.1, steps=4)
        >>> for step in range(4):
        ...     optimizer.step()
        ...     warmup.step()
        ...     print(round(warmup.get_last_lr()[0], 3))
        0.125
        0.15
        0.175
        0.2
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        start_lr: float | Sequence[float],
        *,
        steps: int | None = None,
        epochs: float | None = None,
        steps_per_epoch: int = 1,
        momentum_correction: bool = False,
        last_epoch: int = -1,
    ) -> None:
        self.total_steps = _steps(steps, epochs, steps_per_epoch)
        self.start_lrs = _start_lrs(start_lr, optimizer)
        # By group: what other schedulers have multiplied the rate by.
        self._others = [1.0] * len(self.start_lrs)
        if momentum_correction:
            correct_momentum(optimizer)
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | torch.Tensor]:
        """The rates for the current step; `get_last_lr()` says the last ones."""
        groups = self.optimizer.param_groups
        if self.last_epoch > self.total_steps:
            return [group["lr"] for group in groups]
        now = [float(group["lr"]) for group in groups]
        closed = [float(lr) for lr in self._get_closed_form_lr(keep=True)]
        if self.last_epoch == 0:
            # Others in a chain may have changed it at their own start.
            self._others = _ratios(now, [float(lr) for lr in self.base_lrs], self._others)
        elif not hasattr(self, "_last_lr"):
            # Made with last_epoch: the optimizer has the rate of this step.
            self._others = _ratios(now, closed, self._others)
        else:
            self._others = self._changed(now)
        return [lr * others for lr, others in zip(closed, self._others, strict=True)]

    def _changed(self, now: list[float]) -> list[float]:
        """What others have multiplied the rates by, now that the optimizer has these."""
        last = [float(lr) for lr in self._last_lr]
        changed = _ratios(now, last, [1.0] * len(now))
        others = [a * b for a, b in zip(self._others, changed, strict=True)]
        for group, (lr, before) in enumerate(zip(now, last, strict=True)):
            is_raised = changed[group] > 1 and others[group] > 1 + _ROUNDING
            if is_raised or (before == 0 and lr != 0):
                raise RuntimeError(
                    f"GradualWarmup.step: the rate of parameter group {group} was {before:.6g} "
                    f"after step {self.last_epoch - 1} of {self.total_steps}, and is {lr:.6g} now: "
                    "something has set it, as LambdaLR, CosineAnnealingWarmRestarts, CyclicLR and "
                    "OneCycleLR do; side by side or in ChainedScheduler only schedulers that "
                    "multiply the rate go with a warm-up: let that one follow it, "
                    "SequentialLR(optimizer, [warmup, other], [steps])"
                )
        return others

    def _get_closed_form_lr(self, keep: bool = False) -> list[float | torch.Tensor]:
        """The rates without other schedulers; torch calls it for `step(epoch)`, and where a
        `SequentialLR` comes to this scheduler. keep: what others have done is not forgotten."""
        groups = len(self.optimizer.param_groups)
        if groups != len(self.base_lrs):
            raise RuntimeError(
                f"GradualWarmup.step: the optimizer has {groups} parameter groups, and had "
                f"{len(self.base_lrs)} when this was made; call add_param_group before you make "
                f"it, or after its {self.total_steps} steps"
            )
        if not keep:
            self._others = [1.0] * len(self._others)
        if self.last_epoch >= self.total_steps:
            return [float(lr) for lr in self.base_lrs]
        done = max(self.last_epoch, 0) / self.total_steps
        return [
            start + (float(lr) - start) * done
            for start, lr in zip(self.start_lrs, self.base_lrs, strict=True)
        ]


def _steps(steps: int | None, epochs: float | None, steps_per_epoch: int) -> int:
    if (steps is None) == (epochs is None):
        raise ValueError(
            f"GradualWarmup: steps={steps}, epochs={epochs}: expected one of them, the length of "
            "the warm-up"
        )
    if steps_per_epoch < 1:
        raise ValueError(f"GradualWarmup: steps_per_epoch={steps_per_epoch}, expected at least 1")
    length = steps if epochs is None else epochs * steps_per_epoch
    if length is None or not 0 <= length < math.inf:
        raise ValueError(f"GradualWarmup: a warm-up of {length} steps; expected 0 or more")
    return round(length)


def _start_lrs(start_lr: float | Sequence[float], optimizer: torch.optim.Optimizer) -> list[float]:
    groups = optimizer.param_groups
    lrs = [float(group.get("initial_lr", group["lr"])) for group in groups]
    starts = list(start_lr) if isinstance(start_lr, Sequence) else [start_lr] * len(lrs)
    if len(starts) != len(lrs):
        raise ValueError(
            f"GradualWarmup: {len(starts)} start rates for {len(lrs)} parameter groups; pass one "
            "for each group"
        )
    for group, (start, lr) in enumerate(zip(starts, lrs, strict=True)):
        # The rate may be a tensor, and the same number a little less there.
        if lr < start <= lr * (1 + _precision(groups[group]["lr"])):
            starts[group] = start = lr
        if not 0 <= start <= lr:
            raise ValueError(
                f"GradualWarmup: start_lr={start} of parameter group {group} is not between 0 and "
                f"the group's rate {lr}, at which the warm-up ends; make the optimizer with the "
                "scaled rate, and pass a list if the groups start at different rates"
            )
    return starts


def _precision(lr: float | torch.Tensor) -> float:
    """The relative distance of two neighbours among such numbers."""
    if isinstance(lr, torch.Tensor) and lr.is_floating_point():
        return torch.finfo(lr.dtype).eps
    return torch.finfo(torch.float64).eps


def _ratios(lrs: list[float], to: list[float], where_zero: list[float]) -> list[float]:
    return [
        other if base == 0 else lr / base
        for lr, base, other in zip(lrs, to, where_zero, strict=True)
    ]
