"""The methods of optimizers that reduce gradients."""

from __future__ import annotations

import contextlib
import functools
import numbers
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hvdlite.collectives.allreduce import allreduce_
from hvdlite.errors import NumericsError
from hvdlite.ops import Average, Sum
from hvdlite.optimizer.arguments import checked_passes, checked_weight
from hvdlite.optimizer.reducer import Reducer
from hvdlite.optimizer.sharding.words import shared_too_late
from hvdlite.optimizer.weighing import require_reduced_weights, set_weight, weigh_passes
from hvdlite.optimizer.wrapping import Wrapper
from hvdlite.own_names import own_name
from hvdlite.shared.parameters import is_shared, shares_any


@dataclass
class Calls:
    """The user's earlier calls that matter to `step`."""

    synchronized: bool = False
    skip: bool = False
    warned: bool = False
    # Some step had all its backward_passes_per_step, or its lack was reported: a step that has
    # fewer after this is the end of an epoch.
    accumulated: bool = False


class GradientOptimizer(Wrapper):
    """The methods that a distributed optimizer which reduces gradients adds to its class."""

    _hvdlite_reducer: Reducer
    _hvdlite_calls: Calls

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The step of the wrapped class, with reduced gradients on every rank.

        A closure runs first, and its gradients are reduced, before the step. The loss that it
        returns is averaged over the ranks (with op=Sum: added, as the gradients are), so that an
        optimizer which looks at it does the same on every rank; `step` returns this loss. Every
        rank calls `step`, with a closure or without, as the others do.

        Raises:
            HorovodInternalError: The reduction failed, on every rank; as `NumericsError` if
                HVDLITE_CHECK_NUMERICS has found NaN or an infinite gradient on some rank. No
                parameter has changed then, unless by an optimizer that had called its closure
                before.
        """
        reducer, calls = self._hvdlite_reducer, self._hvdlite_calls
        if reducer.step_is_due and _grad_scaler_calls(5):
            reducer.step_is_due = False
        closure = kwargs.get("closure", args[0] if args else None)
        if callable(closure):
            reducer.micro_batches.refuse(
                "step(closure)",
                "call the closure for each micro-batch before, and step() without it",
            )
            if "closure" in kwargs:
                kwargs["closure"] = self._synchronizing(closure)
            else:
                args = (self._synchronizing(closure), *args[1:])
        elif not calls.skip:
            if calls.synchronized and not calls.warned:
                calls.warned = True
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after "
                    "optimizer.synchronize(): the gradients are not reduced again; wrap step() in "
                    "`with optimizer.skip_synchronize():` if this is intended",
                    stacklevel=3,
                )
            self._finish()
        else:
            reducer.refuse_raised()
            if reducer.has_added():
                reducer.finish()
            require_reduced_weights(reducer)
            reducer.micro_batches.require_reduced(reducer.has_communicated())
        if not callable(closure):
            self._require_finite()
        # A rank may make steps with its own unreduced gradients as often as it likes.
        is_shared = callable(closure) or reducer.has_communicated()
        if is_shared:
            reducer.begin_step()
        result = self._update(is_shared, args, kwargs)
        calls.synchronized = False
        if is_shared:
            reducer.end_step()
            name = reducer.gradients.name
            self._hvdlite_check.after_step(self, name, reducer.steps_since_join())
        else:
            reducer.next_step()
            self._hvdlite_check.after_local_step()
        return result

    def _skips_step(self) -> bool:
        """Whether GradScaler calls the step of a fused optimizer that is to change nothing. Waits
        for the device then."""
        found = vars(self).get("found_inf")
        return found is not None and bool(found)

    def _update(self, is_reduced: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The wrapped class's step. is_reduced: its gradients are reduced ones.

        Raises:
            RuntimeError: Parameters are shared that were not when the optimizer was made.
        """
        if shares_any():
            for slot in self._hvdlite_reducer.gradients.slots:
                if is_shared(slot.param):
                    raise RuntimeError(shared_too_late(slot.name))
        return self._wrapped_step(*args, **kwargs)

    def _wrapped_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().step(*args, **kwargs)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """That of the wrapped class; the next backward starts anew.

        If the last backward or step has raised here, its gradients are given up on all ranks.
        Blocks then.

        Raises:
            RuntimeError: Inside a backward that reduces gradients.
            HorovodInternalError: The reduction has failed, on every rank.
        """
        self._hvdlite_reducer.settle()
        super().zero_grad(*args, **kwargs)
        self._hvdlite_calls.synchronized = False
        self._hvdlite_reducer.next_step()

    def add_param_group(self, *args: Any, **kwargs: Any) -> None:
        """That of the wrapped class; the gradients of the new parameters are reduced too: those
        that have come already, in `step`."""
        super().add_param_group(*args, **kwargs)
        self._hvdlite_reducer.note_parameters()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether `step` itself handles infinite gradients for GradScaler, which asks when it is
        told to make a step. That is the only way to learn of steps that it then skips."""
        if _grad_scaler_calls(1):
            self._hvdlite_reducer.expect_step()
        inherited = getattr(super(), "_step_supports_amp_scaling", False)
        return bool(vars(self).get("_step_supports_amp_scaling", inherited))

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        vars(self)["_step_supports_amp_scaling"] = value

    def synchronize(self) -> None:
        """Returns when this step's gradients are reduced: at once after a backward that
        communicated; else it reduces them now, and every rank must call it."""
        self._finish()
        self._hvdlite_calls.synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, `step` does not reduce: `synchronize` was called before."""
        self._hvdlite_calls.skip = True
        try:
            yield
        finally:
            self._hvdlite_calls.skip = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate on this rank only; the next one outside reduces it all."""
        reducer = self._hvdlite_reducer
        reducer.micro_batches.refuse(
            "no_sync()", "the last of a step's micro-batches reduces by itself; leave no_sync() out"
        )
        before, reducer.communicates = reducer.communicates, False
        weigh_passes(reducer)
        try:
            yield
        finally:
            reducer.communicates = before

    @property
    def backward_passes_per_step(self) -> int:
        """N: gradients are reduced every N backward passes."""
        return self._hvdlite_reducer.passes_per_step

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Gradients are reduced every `passes` backward passes, counted from now."""
        self._hvdlite_reducer.set_passes_per_step(checked_passes(passes))

    def set_weight(self, weight: float) -> None:
        """How much this rank's next backward counts in the average: mostly the number of its
        samples, or tokens.

        The reduced gradient is then Σ weight·gradient / Σ weight over all ranks. If the loss is the
        mean over the rank's samples, this is the gradient of the mean over the samples of all
        ranks: that of one process on the joined batch. The weights travel with the gradients, so
        that a step needs no message more. Only their ratios matter (not so with float16, see
        below). Weights of 1.0 on all ranks, as `len(batch) / batch_size` of full batches, give the
        bits of the plain average and cost nothing. Others cost nothing on one host, where equal
        ones give these bits too (but in deterministic mode); between hosts and on GPUs they cost
        one more pass over the gradients.

        Call it on every rank before each backward, or on none: it counts until the next `step`,
        or `zero_grad` after a backward. If some ranks have called it and others have not, the
        backward raises on every rank. Not collective; does not block.

        - Several backward passes before a step (backward_passes_per_step, no_sync): each counts
          with the weight that was last given before it. The result is the mean over the samples of
          all passes: do not divide the loss by the number of passes, and give `recipes.scale_lr`
          the argument loss_divided=True. Until the reduction the gradients are weighted sums.
        - Weight 0: the rank has no samples. Its gradients count as zeros, even if they are NaN. If
          all weights are 0, the gradients are zero on all ranks.
        - A rank that has joined does not count: the others' average is that of their samples. (In
          steps without weights it is divided by the number of all ranks.)
        - A closure's loss is averaged with the same weights.
        - On a rank outside the process set `.grad` is the mean over the samples of its own passes.
        - Gradients that travel as float16 (Compression.fp16, or float16 parameters) would overflow
          when multiplied by large numbers, and lose their digits when multiplied by small ones.
          There give weights of at most 1, of which the largest one of all ranks is near 1. If it is
          below 0.001, the backward raises on every rank.

        Args:
            weight: A number, or a tensor of one number: 0, or from 1e-9 to 1e15.

        Raises:
            ValueError: Another argument; more than 1 with float16; op is not Average.
            RuntimeError: The gradients of this step are reduced already or in flight, or a
                backward pass of this step had no weight.

        Example:
            >>> model = torch.nn.Linear(1, 1)
            >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            >>> optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            >>> batch = torch.ones(3 + hvd.rank(), 1)  # more samples on higher ranks
            >>> optimizer.set_weight(len(batch))
            >>> model(batch).square().mean().backward()
            >>> optimizer.step()
        """
        reducer = self._hvdlite_reducer
        set_weight(reducer, checked_weight(weight, reducer.gradients.combining.op))

    def _finish(self) -> None:
        """Reduces the gradients of this step; warns if the first step comes too early."""
        reducer, calls = self._hvdlite_reducer, self._hvdlite_calls
        if not calls.accumulated and reducer.passes_per_step > 1:
            short = reducer.short_of_passes()
            calls.accumulated = short is not None or reducer.has_communicated()
            if short is not None:
                warnings.warn(
                    f"optimizer.step() after {short[0]} of backward_passes_per_step={short[1]} "
                    "backward passes: the gradients are reduced now, and nothing is accumulated; "
                    f"call zero_grad() and step() once every {short[1]} backward passes, or leave "
                    "out backward_passes_per_step",
                    stacklevel=4,
                )
        reducer.finish()

    def _require_finite(self, in_closure: bool = False) -> None:
        """Before a step with reduced gradients, which changes nothing if this raises.

        in_closure: an optimizer that calls its closure several times may have changed parameters
            before.

        Raises:
            NumericsError: HVDLITE_CHECK_NUMERICS has found that they are not finite; on every rank.
        """
        step = self._hvdlite_reducer.step
        if step.not_finite is None or (not in_closure and self._skips_step()):
            return
        text, step.not_finite = step.not_finite, None
        what = "The parameters are as they were when the closure was called"
        raise NumericsError(f"{text}. {what if in_closure else 'No parameter has changed'}")

    def _loss_of_all(self, loss: Any) -> Any:
        """After `_finish`: the losses that the ranks' closures have returned, combined and weighted
        like their gradients. Collective; blocks.

        A loss that is not a number counts as zero, as a missing gradient does. A rank whose closure
        returned None gets the loss of the others; anything else that is not a number is returned as
        is. The value is the same on every rank: a detached tensor like the rank's own, or a number
        of the same type, but a float if that is a whole number.
        """
        gradients, weight = self._hvdlite_reducer.gradients, self._hvdlite_reducer.weights.last
        if gradients.team is None or gradients.team.size == 1:
            return loss
        own, own_weight = _number(loss), 1.0 if weight is None else weight
        weighed = 0.0 if own is None or not own_weight else own * own_weight
        # A one beside the loss tells a loss of zero from no loss. Then the weight.
        sums = torch.tensor(
            [weighed, float(own is not None), own_weight], dtype=torch.float64, device="cpu"
        )
        name = own_name(gradients.name, "loss", "the reduction of the closure's loss of {}")
        op = Sum if gradients.combining.op is Sum else Average
        allreduce_(sums, name=name, op=op, process_set=gradients.process_set)
        value, present, weights = sums.tolist()
        if weight is not None and weights:
            value /= weights
        if not present or (own is None and loss is not None):
            return loss
        if isinstance(loss, torch.Tensor):
            dtype = loss.dtype if loss.is_floating_point() else torch.float64
            return torch.full_like(loss.detach(), value, dtype=dtype, requires_grad=False)
        is_whole = own is None or isinstance(loss, numbers.Rational)
        return value if is_whole else type(loss)(value)

    def _synchronizing(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """The closure, followed by the reduction of its gradients and its loss. The optimizer may
        call it several times: equally often on all ranks, if these results decide it."""

        @functools.wraps(closure)
        def synchronized(*args: Any, **kwargs: Any) -> Any:
            weights = self._hvdlite_reducer.weights
            weights.in_closure = True
            try:
                loss = closure(*args, **kwargs)
                self._finish()
                self._require_finite(in_closure=True)
            finally:
                weights.in_closure = False
            return self._loss_of_all(loss)

        return synchronized


def _number(loss: Any) -> float | None:
    """A tensor of one element, or a number of Python's or numpy's; None: something else."""
    if isinstance(loss, torch.Tensor):
        return float(loss.detach()) if loss.numel() == 1 and not loss.is_complex() else None
    is_number = not isinstance(loss, bool) and isinstance(loss, numbers.Real)
    return float(loss) if is_number else None


def _grad_scaler_calls(depth: int) -> bool:
    """Whether torch's GradScaler is among the nearest `depth` callers of the calling function."""
    frame = sys._getframe(1).f_back
    while frame is not None and depth:
        if frame.f_globals.get("__name__") == "torch.amp.grad_scaler":
            return True
        frame, depth = frame.f_back, depth - 1
    return False
