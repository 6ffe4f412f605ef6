"""A test in one function, which runs on every rank of its world."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvdlite as hvd


def on_ranks(
    *sizes: int, hosts: tuple[str, ...] = (), knobs: dict[str, str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turns a function into a test with the fixture `world`, which runs it on all ranks.

    Before it hvdlite is initialized, and torch's generator gets the same seed on all ranks. The
    function's parameters are those of the test; their values are pickled.

    sizes, hosts: as the marks `ranks` and `hosts`; without them those of the module count.
    knobs: of `World.run`, unless the test has a parameter of that name.
    """

    def made(body: Callable[..., None]) -> Callable[..., None]:
        def case(arguments: dict[str, Any]) -> None:
            hvd.init()
            torch.manual_seed(0)
            body(**arguments)

        def test(world: Any, **arguments: Any) -> None:
            __tracebackhide__ = True
            world.run(case, arguments, knobs=arguments.get("knobs", knobs))

        test.__name__, test.__module__, test.__doc__ = body.__name__, body.__module__, body.__doc__
        test.__qualname__ = body.__qualname__
        # Where a rank finds it.
        case.__module__, case.__qualname__ = body.__module__, f"{body.__qualname__}.case"
        test.case = case  # type: ignore[attr-defined]
        world = inspect.Parameter("world", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(body).parameters.values()
        test.__signature__ = inspect.Signature([world, *parameters])  # type: ignore[attr-defined]
        if sizes:
            test = pytest.mark.ranks(*sizes)(test)
        return pytest.mark.hosts(*hosts)(test) if hosts else test

    return made
