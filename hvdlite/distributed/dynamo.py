"""Keeps torch.compile out of the process group: its frames run as they are, as a backend in C++
would."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType, ModuleType

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

# Of the frame itself, and of all that it calls.
_SKIP = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)


def skip(module: ModuleType) -> None:
    """Marks all functions of a module, also those inside its classes and functions."""
    for thing in vars(module).values():
        if getattr(thing, "__module__", None) == module.__name__:
            for code in _codes(thing):
                set_code_exec_strategy(code, _SKIP)


def _codes(thing: object) -> Iterator[CodeType]:
    if inspect.isclass(thing):
        for member in vars(thing).values():
            yield from _codes(member)
    elif isinstance(thing, property):
        yield from _codes(thing.fget)
    elif inspect.isfunction(thing):
        yield from _within(thing.__code__)


def _within(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _within(constant)
