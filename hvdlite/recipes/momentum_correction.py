"""Momentum correction: keeps a change of the learning rate out of the momentum.

From Goyal et al., 2017, section 3, remark 2. There are two forms of SGD with momentum m, which are
the same as long as the learning rate η is:

    (9)   u ← m·u + g,      w ← w - η·u
    (10)  v ← m·v + η·g,    w ← w - v

With v = η·u they stay the same when η changes to η' if (10) becomes v ← m·(η'/η)·v + η'·g: put
v = η·u into it and divide by η', and it is (9). Without the factor η'/η the old gradients keep the
old rate, so that the momentum is too small for η' while the rate rises, and too large after it
falls.

PyTorch's optimizers have the form (9): their buffers are sums of gradients, and they multiply by
the rate when they change the parameters. They need no correction, and one would be applied twice.
Optimizers in the form (10), as that of Caffe, of Keras, or LARS as published, do.

Horovod's callback for Keras multiplies m by η'/η for one step. That is the same for plain momentum.
Here the buffer is multiplied instead, which is right for Nesterov's momentum too: m stands there a
second time, in the step w ← w - (m·v + η'·g), and is not to be changed.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

# In the parameter groups, so that it is saved and loaded with the buffers.
_IN_BUFFERS = "lr_in_momentum"


def correct_momentum(
    optimizer: torch.optim.Optimizer, buffer: str = "momentum_buffer"
) -> RemovableHandle:
    """Multiplies momentum buffers by η'/η before each step whose learning rate η' is another than
    the last step's, η: for optimizers whose buffers contain the rate (Goyal et al., 2017, eq. 10).

    It works with whatever changes the rate. The rate that the buffers contain is kept in the
    parameter groups ("lr_in_momentum"), and so in the optimizer's `state_dict()`.

    Nothing is sent: every rank calls it.

    Args:
        optimizer: Before or after `DistributedOptimizer` wraps it.
        buffer: The buffers' name in the state of the parameters.

    Returns:
        A handle, whose `remove()` ends it.

    Raises:
        ValueError: The step is one of PyTorch's, which keep the rate out of their buffers.

    Example:
        >>> from hvdlite.recipes import correct_momentum
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
        >>> try:
        ...     correct_momentum(optimizer)
        ... except ValueError as error:
        ...     print(error)
        correct_momentum: SGD's momentum buffers do not contain the learning rate...
    """
    # The step of a distributed optimizer says that it is that of the wrapped class.
    if type(optimizer).step.__module__.startswith("torch.optim."):
        raise ValueError(
            f"correct_momentum: {type(optimizer).__name__}'s momentum buffers do not contain the "
            "learning rate, as in all optimizers of PyTorch; a correction would be applied "
            "twice. Leave it out (momentum_correction=False)"
        )
    for group in optimizer.param_groups:
        group.setdefault(_IN_BUFFERS, float(group["lr"]))
    return optimizer.register_step_pre_hook(functools.partial(_correct, buffer))


def _correct(buffer: str, optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        before, now = group.get(_IN_BUFFERS, 0.0), float(group["lr"])
        if before and before != now:
            for param in group["params"]:
                momentum = optimizer.state.get(param, {}).get(buffer)
                if momentum is not None:
                    momentum.mul_(now / before)
        group[_IN_BUFFERS] = now
