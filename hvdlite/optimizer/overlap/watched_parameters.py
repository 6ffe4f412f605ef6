"""The `_parameters` of a module, of which each read waits until the parameter is whole.

All that reads a parameter through its module goes by this dict: attributes (also those of children
that are never called), `parameters()`, `state_dict()`, `functional_call`, parametrizations. Copies
are ordinary dicts.

torch.compile traces these methods once, and its graphs then read the parameters themselves, without
waiting. So once it has traced a read, no step leaves parameters in flight any more.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

from torch.compiler import is_dynamo_compiling

from hvdlite.optimizer.overlap import in_flight
from hvdlite.optimizer.overlap.in_flight import by_param
from hvdlite.world import world

log = logging.getLogger("hvdlite")

# Whether torch.compile has traced a read. Of any model: its graphs also serve other models of the
# same class, without tracing them.
is_compiled = False


def _note_compiling() -> None:
    global is_compiled
    if not is_compiled and world.is_initialized() and world.rank() == 0:
        log.warning(
            "overlap_forward has no effect from now on: torch.compile has compiled a forward, and "
            "compiled code does not wait for single parameters, so optimizer.step() waits for all; "
            "leave out overlap_forward or torch.compile"
        )
    is_compiled = True
    in_flight.wait_for_all()


# The mark of torch.compiler.assume_constant_result, which would import all of the compiler: it
# calls the function while it traces.
_note_compiling._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _waiting(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a dict that waits for all parameters in it first."""

    @functools.wraps(method)
    def waiting(self: dict[str, Any], *args: Any) -> Any:
        if is_dynamo_compiling():
            _note_compiling()
        elif by_param:
            in_flight.wait_for(param for param in dict.values(self) if param is not None)
        return method(self, *args)

    return waiting


class WatchedParameters(dict[str, Any]):
    """Writes are those of a dict."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Any:
        param = dict.__getitem__(self, name)
        if is_dynamo_compiling():
            _note_compiling()
        elif by_param and (arrival := by_param.get(id(param))) is not None:
            in_flight.wait_for_arrival(arrival)
        return param

    get = _waiting(dict.get)
    items = _waiting(dict.items)
    values = _waiting(dict.values)
    pop = _waiting(dict.pop)
    popitem = _waiting(dict.popitem)
    setdefault = _waiting(dict.setdefault)
    copy = _waiting(dict.copy)
    __or__ = _waiting(dict.__or__)
    __ror__ = _waiting(dict.__ror__)
    __repr__ = _waiting(dict.__repr__)

    def __iter__(self) -> Iterator[str]:
        # A class with an iterator of its own is copied (`dict(x)`, `{**x}`, `y.update(x)`) by
        # `__getitem__`, and not behind its back.
        return dict.__iter__(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # For copies and pickles, which are ordinary dicts.
        return dict, (), None, None, iter(self.items())
