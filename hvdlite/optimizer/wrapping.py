"""Wraps an optimizer: the user's object and the distributed one share all their attributes.

The distributed optimizer is an instance of a new subclass of the optimizer's class. hvdlite keeps
its own data in that class and not among the attributes, which belong to the user.
"""

from __future__ import annotations

import functools
import types
import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hvdlite.optimizer.periodic_check import PeriodicCheck


class Wrapper(torch.optim.Optimizer):
    """Base of all distributed optimizers. Subclasses add their methods, and are never constructed:
    `wrap` makes the instances."""

    _hvdlite_check: PeriodicCheck

    def __init_subclass__(cls) -> None:
        """Does not call that of the wrapped class, which may need arguments, or register its
        subclasses: the distributed optimizer's class must not be registered."""

    def __init__(self) -> None:
        raise TypeError("use hvdlite.DistributedOptimizer")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a distributed optimizer can't be copied or pickled, because it belongs to this rank; "
            "copy or save its state_dict(), or copy the optimizer before wrapping it"
        )

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """`torch.nn.utils.clip_grad_norm_` for all parameters of the optimizer; returns the norm
        before clipping. Reduces them if they are not reduced yet, and so every rank calls it."""
        self._finish()
        params = [param for group in self.param_groups for param in group["params"]]
        return torch.nn.utils.clip_grad_norm_(
            params, max_norm, norm_type, error_if_nonfinite, foreach
        )

    def full_state_dict(self) -> dict[str, Any]:
        """The `state_dict()` of all parameters on rank 0 (the first rank of the process set), {} on
        the others. With `shard` every rank calls it."""
        return self.state_dict() if self._is_first() else {}

    def wait_for_parameters(self) -> None:
        """Blocks until all parameters of the last `step` have their new values.

        Needed with `overlap_forward` only, before parameters are read otherwise than through the
        model: from a list, `param_groups`, an array that shares their memory. Not collective.

        Raises:
            HorovodInternalError: Other ranks' parts did not come; on every rank.
        """

    def _replicates_state(self, param: torch.Tensor, index: int) -> bool:
        """Whether every rank has the state of this parameter in full, and the same. index: its
        index among the parameters."""
        return True

    def _steps_made(self) -> int:
        """How many steps it has made together with the other ranks."""
        return self._hvdlite_check.steps

    def _is_first(self) -> bool:
        """Whether this is the first rank of the process set."""
        team = self._hvdlite_check.process_set.team
        return team is not None and team.rank == 0

    def _finish(self) -> None:
        """Reduces gradients of this step that are not reduced yet."""


def wrap(optimizer: torch.optim.Optimizer, kind: type[Wrapper], **attributes: Any) -> Any:
    """An instance of a new subclass of the optimizer's class, in which methods of `kind` come
    first.

    attributes: attributes of the new class.
    """
    wrapped = type(optimizer)
    distributed: Any = types.new_class(wrapped.__name__, (kind, wrapped))
    distributed.__module__, distributed.__doc__ = wrapped.__module__, wrapped.__doc__
    for name, value in attributes.items():
        setattr(distributed, name, value)
    distributed.step = _step(kind, wrapped)
    # The wrapped class's __init__ is not called again: its arguments are not known.
    result = distributed.__new__(distributed)
    # Both objects share one __dict__: what load_state_dict or a scheduler replaces in one is
    # replaced in the other.
    # Not by the class's own __setattr__, which may need attributes that do not exist yet.
    object.__setattr__(result, "__dict__", optimizer.__dict__)
    _redirect_step(result)
    return result


def _step(kind: type[Wrapper], wrapped: type[torch.optim.Optimizer]) -> Any:
    """The step of `kind` with the signature of the wrapped one, which GradScaler inspects."""

    @functools.wraps(wrapped.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        return kind.step(self, *args, **kwargs)

    # Keeps torch from wrapping it to run the hooks of register_step_pre_hook: the wrapped class's
    # step, called inside, runs them already.
    step.hooked = True  # type: ignore[attr-defined]
    return step


def _redirect_step(result: torch.optim.Optimizer) -> None:
    """A scheduler made before the wrapping has put its own `step` among the attributes, bound to
    the wrapped optimizer. That must not hide the distributed step, and must see its calls."""
    attributes = result.__dict__
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
