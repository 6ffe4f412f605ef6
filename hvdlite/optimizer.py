"""DistributedOptimizer: an optimizer whose gradients are reduced over all ranks."""

from __future__ import annotations

import contextlib
import functools
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from hvdlite.compression import Compression, Compressor
from hvdlite.ops import Average, ReduceOp, Sum
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.reducer import Reducer

# Where an optimizer keeps what is hvdlite's: in the attributes that wrapper and wrapped share.
_REDUCER = "_hvdlite_reducer"


class _Distributed(torch.optim.Optimizer):
    """What a distributed optimizer adds to its class. Made by `DistributedOptimizer` only."""

    _hvdlite_reducer: Reducer
    _hvdlite_synchronized = False
    _hvdlite_skip = False
    _hvdlite_warned = False

    def __init__(self) -> None:
        raise TypeError("use hvdlite.DistributedOptimizer")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a distributed optimizer can't be copied or pickled, as it is tied to this process's "
            "place in the world; save its state_dict(), or copy the optimizer before wrapping it"
        )

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The step of the wrapped class, with reduced gradients on every rank.

        A closure runs first, and its gradients are reduced, before the step. Every rank calls it.

        Raises:
            HorovodInternalError: The reduction failed, on every rank.
        """
        reducer = self._hvdlite_reducer
        closure = kwargs.get("closure", args[0] if args else None)
        if callable(closure):
            if "closure" in kwargs:
                kwargs["closure"] = self._synchronizing(closure)
            else:
                args = (self._synchronizing(closure), *args[1:])
        elif not self._hvdlite_skip:
            if self._hvdlite_synchronized and not self._hvdlite_warned:
                self._hvdlite_warned = True
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after "
                    "optimizer.synchronize(): the gradients are not reduced again; wrap step() in "
                    "`with optimizer.skip_synchronize():` to say that this is meant",
                    stacklevel=2,
                )
            reducer.finish()
        result = super().step(*args, **kwargs)
        self._hvdlite_synchronized = False
        reducer.next_step()
        return result

    # torch would wrap it to run the hooks of register_step_pre_hook; those of the wrapped class's
    # step, which is called inside, run them already.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """That of the wrapped class; the next backward starts anew.

        Raises:
            RuntimeError: Reductions are in flight, since a backward raised.
        """
        if self._hvdlite_reducer.in_flight():
            raise RuntimeError(
                "zero_grad() while gradients are being reduced: the last backward() did not end; "
                "call synchronize() first"
            )
        super().zero_grad(*args, **kwargs)
        self._hvdlite_synchronized = False
        self._hvdlite_reducer.next_step()

    def synchronize(self) -> None:
        """Returns when this step's gradients are reduced: at once after a backward that
        communicated; else it reduces them now, and every rank must call it."""
        self._hvdlite_reducer.finish()
        self._hvdlite_synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Inside, `step` does not reduce: `synchronize` was called before."""
        self._hvdlite_skip = True
        try:
            yield
        finally:
            self._hvdlite_skip = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate on this rank only; the next one outside reduces it all."""
        reducer = self._hvdlite_reducer
        before, reducer.communicates = reducer.communicates, False
        try:
            yield
        finally:
            reducer.communicates = before

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From now on every `passes`-th backward communicates; counted from now."""
        self._hvdlite_reducer.set_passes_per_step(_checked_passes(passes))

    def _synchronizing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, after which its gradients are reduced; it may be called several times."""

        def synchronized() -> Any:
            loss = closure()
            self._hvdlite_reducer.finish()
            return loss

        return synchronized


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
) -> Any:
    """Makes an optimizer reduce its gradients over all ranks, while backward still runs.

    When a `backward()` that communicates returns, `.grad` holds the reduced gradients on every rank
    (in order of the ranks within a host, whatever the timing), so clipping and GradScaler work as
    in one process. Every rank makes its distributed optimizers in the same order, over the same
    parameters, and calls `backward` and `step` equally often; a rank whose backward reaches no
    parameter takes part in `step`.

    Args:
        optimizer: Any torch optimizer. It shares its state, options and parameter groups with the
            result for good.
        named_parameters: `model.named_parameters()`: names for error messages.
        compression: Compression.none, .fp16 or .bf16: in which form gradients travel.
        backward_passes_per_step: Every so manyth backward communicates; the sum of their gradients
            is not divided by the number.
        op: Average or Sum.
        gradient_predivide_factor: With Average: divides by this before adding, and by size / this
            afterwards.
        num_groups: The older form of a number of `groups`.
        groups: Gradients to reduce together: lists of parameters, or the number of groups to form.
            By default they are put together by size.
        sparse_as_dense: Makes sparse gradients dense. Otherwise they are an error.
        process_set: The ranks that take part.

    Returns:
        An instance of the optimizer's own class, with the methods synchronize, skip_synchronize,
        no_sync and set_backward_passes_per_step besides.

    Raises:
        ValueError: Names that are no pairs, duplicate or missing; fewer than one pass per step;
            another op; predivide with an op other than Average; a parameter in two groups.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, _Distributed):
        raise ValueError("this optimizer is distributed already")
    if process_set is not global_process_set:
        raise ValueError(f"process_set={process_set!r} is not global_process_set")
    if op not in (Average, Sum) or not isinstance(op, ReduceOp):
        raise ValueError(f"op={op!r}: gradients are combined by Average or Sum")
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise ValueError("gradient_predivide_factor is for op=Average only")
    if not (isinstance(compression, type) and issubclass(compression, Compressor)):
        raise ValueError("compression: expected Compression.none, .fp16 or .bf16")
    params = [param for group in optimizer.param_groups for param in group["params"]]
    attributes = optimizer.__dict__
    reducer = Reducer(
        lambda: attributes["param_groups"],
        _names(named_parameters, params),
        _groups(groups if groups is not None else num_groups, params),
        op=op,
        predivide=gradient_predivide_factor,
        compression=compression,
        passes=_checked_passes(backward_passes_per_step),
        sparse_as_dense=sparse_as_dense,
    )
    wrapped = type(optimizer)
    # Its own methods, then the wrapped class's; whose __init__ is not called again, as what its
    # arguments were is not known.
    distributed: Any = types.new_class(wrapped.__name__, (_Distributed, wrapped))
    distributed.__module__, distributed.__doc__ = wrapped.__module__, wrapped.__doc__
    result = distributed.__new__(distributed)
    # One set of attributes for both objects: what load_state_dict or a scheduler replaces in one
    # is replaced in the other.
    result.__dict__ = attributes
    attributes[_REDUCER] = reducer
    _redirect_step(result, attributes)
    weakref.finalize(result, reducer.detach).atexit = False
    return result


def _redirect_step(result: _Distributed, attributes: dict[str, Any]) -> None:
    """A scheduler that was made before has put its own `step` among the attributes, bound to the
    wrapped optimizer. It must not hide the distributed one, and must see its calls."""
    former = attributes.get("step")
    if former is None:
        return
    reference = weakref.ref(result)

    @functools.wraps(former)
    def step(*args: Any, **kwargs: Any) -> Any:
        distributed = reference()
        if distributed is None:
            return former(*args, **kwargs)
        attributes["_opt_called"] = True
        return type(distributed).step(distributed, *args, **kwargs)

    attributes["step"] = step


def _names(
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None, params: list[torch.Tensor]
) -> dict[int, str]:
    """The parameters' names, by id.

    Raises:
        ValueError: what was given does not name each parameter once.
    """
    named = list(named_parameters or ())
    if not named:
        return {id(param): f"parameter {i}" for i, param in enumerate(params)}
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in named):
        raise ValueError(
            "named_parameters: expected (name, parameter) tuples, as model.named_parameters() gives"
        )
    seen: set[str] = set()
    duplicates = sorted({name for name, _ in named if name in seen or seen.add(name)})  # type: ignore[func-returns-value]
    if duplicates:
        raise ValueError(f"named_parameters: more than one parameter is named {duplicates}")
    names = {id(param): name for name, param in named}
    missing = sum(id(param) not in names for param in params)
    if missing:
        raise ValueError(
            f"named_parameters: {missing} of the optimizer's {len(params)} parameters are not "
            "named; pass model.named_parameters() of the whole model, or nothing"
        )
    return names


def _groups(
    groups: int | Sequence[Sequence[torch.Tensor]], params: list[torch.Tensor]
) -> dict[int, int]:
    """The number of each parameter's group, by the parameter's id; those without are left out.

    Raises:
        ValueError: a parameter in two groups, a negative number.
    """
    if isinstance(groups, int):
        if groups < 0:
            raise ValueError(f"groups={groups}: expected a number that is not negative")
        if groups == 0:
            return {}
        each = -(-len(params) // groups)
        return {id(param): i // each for i, param in enumerate(params)}
    group_of: dict[int, int] = {}
    for number, members in enumerate(groups):
        for param in members:
            if id(param) in group_of:
                raise ValueError("groups: a parameter is in more than one group")
            group_of[id(param)] = number
    return group_of


def _checked_passes(passes: int) -> int:
    if passes < 1:
        raise ValueError(f"backward_passes_per_step={passes}: expected at least 1")
    return passes
