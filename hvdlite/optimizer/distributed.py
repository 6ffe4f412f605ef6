"""DistributedOptimizer: reduces the gradients of an optimizer over all ranks."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvdlite.compression import Compression, Compressor
from hvdlite.ops import Adasum, Average, ReduceOp
from hvdlite.optimizer.adasum import DeltaOptimizer, Deltas
from hvdlite.optimizer.arguments import (
    checked_compression,
    checked_names,
    checked_op,
    checked_passes,
    groups_by_id,
)
from hvdlite.optimizer.buckets.bucket import Combining, Form
from hvdlite.optimizer.reducer import Reducer, release
from hvdlite.optimizer.wrapping import Wrapper, wrap
from hvdlite.world.process_sets import ProcessSet, global_process_set, included


@dataclass
class _Calls:
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
    _hvdlite_calls: _Calls

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The step of the wrapped class, with reduced gradients on every rank.

        A closure runs first, and its gradients are reduced, before the step. The loss that it
        returns is averaged over the ranks (with op=Sum: added, as the gradients are), so that an
        optimizer which looks at it does the same on every rank; `step` returns this loss. Every
        rank calls `step`, with a closure or without, as the others do.

        Raises:
            HorovodInternalError: The reduction failed, on every rank.
        """
        reducer, calls = self._hvdlite_reducer, self._hvdlite_calls
        if reducer.step_is_due and _grad_scaler_calls(5):
            reducer.step_is_due = False
        closure = kwargs.get("closure", args[0] if args else None)
        if callable(closure):
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
            reducer.settle()
        # A rank may make steps with its own unreduced gradients as often as it likes.
        is_shared = callable(closure) or reducer.has_communicated()
        if is_shared:
            reducer.begin_step()
        result = super().step(*args, **kwargs)
        calls.synchronized = False
        if is_shared:
            reducer.end_step()
        else:
            reducer.next_step()
        return result

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """That of the wrapped class; the next backward starts anew.

        If the last backward has raised when other ranks were reducing its gradients already, that
        reduction is ended first. Blocks then.

        Raises:
            RuntimeError: Inside a backward that reduces gradients.
            HorovodInternalError: That reduction failed, on every rank.
        """
        self._hvdlite_reducer.settle()
        super().zero_grad(*args, **kwargs)
        self._hvdlite_calls.synchronized = False
        self._hvdlite_reducer.next_step()

    def add_param_group(self, *args: Any, **kwargs: Any) -> None:
        """That of the wrapped class; the gradients of the new parameters are reduced too."""
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
        before, reducer.communicates = reducer.communicates, False
        try:
            yield
        finally:
            reducer.communicates = before

    @property
    def backward_passes_per_step(self) -> int:
        """N, where gradients are reduced every N backward passes."""
        return self._hvdlite_reducer.passes_per_step

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From now on every `passes`-th backward communicates; counted from now."""
        self._hvdlite_reducer.set_passes_per_step(checked_passes(passes))

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

    def _synchronizing(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """The closure, followed by the reduction of its gradients and its loss. The optimizer may
        call it several times: equally often on all ranks, if these results decide it."""

        @functools.wraps(closure)
        def synchronized(*args: Any, **kwargs: Any) -> Any:
            loss = closure(*args, **kwargs)
            self._finish()
            return self._hvdlite_reducer.loss_of_all(loss)

        return synchronized


def _grad_scaler_calls(depth: int) -> bool:
    """Whether torch's GradScaler is among the nearest `depth` callers of the calling function."""
    frame = sys._getframe(1).f_back
    while frame is not None and depth:
        if frame.f_globals.get("__name__") == "torch.amp.grad_scaler":
            return True
        frame, depth = frame.f_back, depth - 1
    return False


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    check_start: bool = True,
) -> Any:
    """Makes an optimizer reduce its gradients over all ranks, while backward still runs.

    When a `backward()` that communicates returns, `.grad` holds the reduced gradients on every rank
    (in order of the ranks within a host, whatever the timing), so clipping and GradScaler work as
    in one process. Every rank makes its distributed optimizers in the same order, over the same
    parameters, and calls `backward` and `step` equally often; a rank whose backward reaches no
    parameter takes part in `step`. Gradients lie in shared buckets, step after step: what shares
    memory with `.grad` (`detach()`, a view) must be cloned to be kept.

    With op=Adasum the gradients stay this rank's own. `step` makes the optimizer's step with them,
    and combines by Adasum what it has changed in each parameter: the delta from its former value.
    Every rank calls `step` equally often, and nothing else is collective.

    Args:
        optimizer: Any torch optimizer. It shares its state, options and parameter groups with the
            result for good.
        named_parameters: `model.named_parameters()`: names for error messages.
        compression: Compression.none, .fp16 or .bf16: in which form gradients (or deltas) travel.
        backward_passes_per_step: Gradients are reduced every N backward passes; the sum of them
            is not divided by the number. With Adasum, where no backward communicates, it has no
            effect.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: With Average: divides by this before adding, and by size / this
            afterwards.
        num_groups: The older form of a number of `groups`.
        groups: Gradients to reduce together: lists of parameters, or the number of groups to form.
            By default they are put together by size. With Adasum, where each delta is combined by
            itself, it has no effect.
        sparse_as_dense: How sparse gradients travel: as dense ones, in the buckets. Otherwise the
            rows that the ranks have are gathered. In either case `.grad` is sparse on every rank
            and has the rows of all of them; but a parameter for which some rank had a dense
            gradient has dense ones from then on.
        process_set: The ranks that take part. On other ranks the result has the same class and
            methods, and communicates nothing.
        check_start: Whether the ranks compare their parameters in the first reduction. Where they
            differ, rank 0 warns, or with HVDLITE_STRICT=1 all ranks raise an error.

    Returns:
        An instance of the optimizer's own class, with the methods synchronize, skip_synchronize,
        no_sync and set_backward_passes_per_step besides.

    Raises:
        ValueError: Names that are no pairs, duplicate or missing; fewer than one pass per step;
            another op; predivide with an op other than Average; a parameter in two groups; a
            process set that is not registered.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        >>> model(torch.randn(4, 2)).square().mean().backward()  # reduces .grad
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, Wrapper):
        raise ValueError("this optimizer is already distributed")
    op = checked_op(op, gradient_predivide_factor)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    names = checked_names(named_parameters, params)
    combining = Combining(
        op,
        float(gradient_predivide_factor),
        checked_compression(compression),
        groups_by_id(groups, num_groups, params),
    )
    passes = checked_passes(backward_passes_per_step)
    is_member = included("DistributedOptimizer", process_set)
    if is_member:
        release(params)
    kind = type(optimizer).__name__
    if op is Adasum:
        deltas = Deltas(
            lambda: optimizer.param_groups, names, combining, kind, process_set, check_start
        )
        return wrap(optimizer, DeltaOptimizer, _hvdlite_deltas=deltas, _hvdlite_passes=[passes])
    reducer = Reducer(
        lambda: optimizer.param_groups,
        names,
        combining,
        passes=passes,
        first_form=_first_form(optimizer, sparse_as_dense),
        sparse_as_dense=bool(sparse_as_dense),
        optimizer=kind,
        process_set=process_set,
        check_start=check_start,
    )
    result = wrap(optimizer, GradientOptimizer, _hvdlite_reducer=reducer, _hvdlite_calls=_Calls())
    weakref.finalize(result, reducer.detach).atexit = False
    return result


def _first_form(optimizer: torch.optim.Optimizer, sparse_as_dense: bool) -> Form:
    """The assumed form of a parameter's gradients before the first one has come."""
    takes_rows_only = isinstance(optimizer, torch.optim.SparseAdam)
    return Form.SPARSE if takes_rows_only and not sparse_as_dense else Form.UNKNOWN
