"""Makes the tensors of results whose size is known only when an operation has ended."""

from __future__ import annotations

import operator
from typing import Any

import torch

from hvdlite import _core

# Both are C code, so `list.extend(map(…))` gets and stores a result with no bytecode in between
# where a signal handler could raise.
_capsule = operator.methodcaller("capsule")
_from_dlpack = torch._C._from_dlpack


def gathered_result(
    operation: _core.Operation, dtype: torch.dtype, made: list[Any] | None = None
) -> torch.Tensor:
    """The rows that the engine has gathered, in host memory. Call it once, after the operation has
    succeeded; or with a list, empty at first, so that it may be called again after an interruption.
    """
    made = [] if made is None else made
    if not made:
        made.extend(map(_capsule, (operation,)))
    if isinstance(made[0], tuple):
        # No elements: from_dlpack refuses shapes that would be too large if the 0 in them were 1.
        return torch.empty(made[0], dtype=dtype, device="cpu")
    if len(made) == 1:
        made.extend(map(_from_dlpack, made[:1]))
    result: torch.Tensor = made[1]
    return result if result.dtype is dtype else result.view(dtype)
