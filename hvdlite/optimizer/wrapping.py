"""One optimizer in two objects: the user's own, and a distributed one that shares all it has.

The distributed optimizer is an instance of a new subclass of the optimizer's class. What is
hvdlite's stands in that class and not among the attributes, which are the user's.
"""

from __future__ import annotations

import functools
import types
import weakref
from typing import Any

import torch


class Wrapper(torch.optim.Optimizer):
    """What all distributed optimizers have. Subclasses add their methods, and are never
    constructed: `wrap` makes the instances."""

    def __init_subclass__(cls) -> None:
        """Ends here, before that of the wrapped class: which may want arguments, or keep a register
        of its subclasses, that the distributed optimizer's class is none of."""

    def __init__(self) -> None:
        raise TypeError("use hvdlite.DistributedOptimizer")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a distributed optimizer can't be copied or pickled, as it is tied to this process's "
            "place in the world; copy or save its state_dict(), or copy the optimizer before "
            "wrapping it"
        )


def wrap(optimizer: torch.optim.Optimizer, kind: type[Wrapper], **attributes: Any) -> Any:
    """An instance of the optimizer's class with the methods of `kind`, which come first.

    attributes: of the new class.
    """
    wrapped = type(optimizer)
    distributed: Any = types.new_class(wrapped.__name__, (kind, wrapped))
    distributed.__module__, distributed.__doc__ = wrapped.__module__, wrapped.__doc__
    for name, value in attributes.items():
        setattr(distributed, name, value)
    distributed.step = _step(kind, wrapped)
    # The wrapped class's __init__ is not called again: what its arguments were is not known.
    result = distributed.__new__(distributed)
    # One set of attributes for both objects: what load_state_dict or a scheduler replaces in one
    # is replaced in the other.
    # Not by the class's own __setattr__, which may want attributes that are not there yet.
    object.__setattr__(result, "__dict__", optimizer.__dict__)
    _redirect_step(result)
    return result


def _step(kind: type[Wrapper], wrapped: type[torch.optim.Optimizer]) -> Any:
    """The step of `kind`, that has the wrapped one's signature: GradScaler looks at it."""

    @functools.wraps(wrapped.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        return kind.step(self, *args, **kwargs)

    # torch would wrap it to run the hooks of register_step_pre_hook; those of the wrapped class's
    # step, which is called inside, run them already.
    step.hooked = True  # type: ignore[attr-defined]
    return step


def _redirect_step(result: torch.optim.Optimizer) -> None:
    """A scheduler that was made before has put its own `step` among the attributes, bound to the
    wrapped optimizer. It must not hide the distributed one, and must see its calls."""
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
