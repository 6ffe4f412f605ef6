"""Faults on purpose (HVDLITE_FAULT) in the steps of an optimizer: nothing without the variable.

They are hooks of torch: one of the optimizer's step, which runs after the reduction and before the
update, and one of a parameter's gradient, which runs before the reduction.
"""

from __future__ import annotations

import functools
import logging
import math
import weakref
from collections.abc import Callable

import torch

from hvdlite.optimizer.wrapping import Wrapper
from hvdlite.world import faults, world
from hvdrun.for_hvdlite import FAULT_VARIABLE, GRADIENT, STEP, Fault

log = logging.getLogger("hvdlite")

NameOf = Callable[[torch.Tensor, int], str]


def put_into(optimizer: Wrapper, name_of: NameOf) -> None:
    """Gives a new optimizer the faults of its steps, if this rank has any.

    name_of: gives the name for a parameter and its index.
    """
    if world.active is None or not world.active.config.fault:
        return
    rank = world.rank()
    for fault in faults.of_rank(world.active.config, rank):
        if fault.place is STEP:
            in_steps = _InSteps(fault, rank, optimizer, name_of)
            optimizer.register_step_pre_hook(in_steps.before_update)
        elif fault.place is GRADIENT:
            found = _parameter(optimizer, fault, name_of)
            if found is not None:
                spoil = functools.partial(_InSteps(fault, rank, optimizer, name_of).spoil, found[1])
                found[0].register_hook(spoil)  # type: ignore[no-untyped-call]


class _InSteps:
    """A fault in the steps of one optimizer.

    It happens at most once per step: a step may run its hooks several times, and several backward
    passes may belong to one step.
    """

    def __init__(self, fault: Fault, rank: int, optimizer: Wrapper, name_of: NameOf) -> None:
        self._fault = fault
        self._rank = rank
        # Hooks outlive the distributed optimizer: they belong to what the user has wrapped.
        self._optimizer = weakref.ref(optimizer)
        self._name_of = name_of
        self._last = 0

    def _due(self, optimizer: Wrapper | None) -> int:
        """The number of the step if the fault happens now, else 0."""
        step = 0 if optimizer is None else optimizer._steps_made() + 1
        if step == self._last or not 0 <= step - self._fault.step < self._fault.times:
            return 0
        self._last = step
        return step

    def spoil(self, name: str, gradient: torch.Tensor) -> torch.Tensor | None:
        step = self._due(self._optimizer())
        if not step:
            return None
        faults.say(self._fault, self._rank, f"the gradient of {name!r}, step {step}")
        return gradient * math.nan  # also of a sparse one

    def before_update(self, stepping: torch.optim.Optimizer, *_: object) -> None:
        optimizer = self._optimizer()
        if optimizer is not stepping or not (step := self._due(optimizer)):
            return
        if self._fault.kind != "bitflip":
            where = f"step {step} of {type(stepping).__name__}"
            faults.happen(self._fault, self._rank, where)
        elif (found := _parameter(stepping, self._fault, self._name_of)) is not None:
            self._flip(stepping, step, *found)

    def _flip(
        self, optimizer: torch.optim.Optimizer, step: int, tensor: torch.Tensor, what: str
    ) -> None:
        if self._fault.value == "state":
            state = optimizer.state.get(tensor, {})
            # The count of the steps is not an element's.
            keys = sorted(key for key in state if key != "step" and torch.is_tensor(state[key]))
            if not keys:
                log.warning(
                    "%s: bitflip:state does nothing: on rank %d %r has no state before step %d; "
                    "expected a later step, and an optimizer that has state, without shard",
                    *(FAULT_VARIABLE, self._rank, what, step),
                )
                return
            tensor, what = state[keys[0]], f"{keys[0]} of {what}"
        bit, bits = self._fault.bit, 8 * tensor.element_size()
        if bit >= bits or not tensor.numel():
            log.warning(
                "%s: bitflip does nothing: %r has %d elements of %d bits; expected a bit below "
                "that of a tensor that is not empty",
                *(FAULT_VARIABLE, what, tensor.numel(), bits),
            )
            return
        # The first element, whatever the strides.
        in_bytes = tensor.detach().as_strided((1,), (1,)).view(torch.uint8)
        in_bytes[bit // 8] ^= 1 << bit % 8
        faults.say(self._fault, self._rank, f"bit {bit} of {what!r}, step {step}")


def _parameter(
    optimizer: torch.optim.Optimizer, fault: Fault, name_of: NameOf
) -> tuple[torch.Tensor, str] | None:
    """The parameter that a fault names, or else the first one that is trained, and its name. None
    if this optimizer does not have it, which a warning says: another one may."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    names = [name_of(param, index) for index, param in enumerate(params)]
    for param, name in zip(params, names, strict=True):
        if param.requires_grad and fault.name in ("", name):
            return param, name
    expected = ", ".join(names[:4]) + (", …" if len(names) > 4 else "")
    log.warning(
        "%s: %s does nothing in the optimizer %s: no trained parameter of it is named %r; "
        "expected one of %s",
        *(FAULT_VARIABLE, fault.kind, type(optimizer).__name__, fault.name, expected),
    )
    return None
