"""What torch.compile must not trace: hooks that autograd calls within a compiled function."""

from __future__ import annotations

import contextlib
from typing import Any, TypeVar

Function = TypeVar("Function")


def uncompiled(function: Function) -> Function:
    """The same function: torch.compile runs it, and all that it calls, as it is.

    `torch.compiler.disable` would wrap it, which costs a microsecond in each call, and import
    Dynamo, which takes seconds.
    """
    code: Any = getattr(function, "__code__", None)
    # (Without these names torch is an older one, whose Dynamo may trace it.)
    with contextlib.suppress(ImportError, AttributeError):
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        strategy = eval_frame._FrameExecStrategy(skip, skip)
        eval_frame.set_code_exec_strategy(code, strategy)
    return function
