"""The reference: for each name in a page's table its signature and docstring."""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from typing import Any

import hvdlite
import hvdlite.recipes

# The name of a method in the tables, for example `optimizer.step`: the object that
# DistributedOptimizer returns, whose class is made for each optimizer.
OPTIMIZER = "optimizer."

ROW = re.compile(r"^\| *((?:`[\w.]+` *)+)\|(?:[^|\n]*\|)*?([^|\n]*)\|$", re.MULTILINE)


def names_in(text: str) -> list[tuple[str, str]]:
    """The names in the first column of the tables, each with the last column of its row."""
    return [
        (name, row[2].strip())
        for row in ROW.finditer(text)
        for name in re.findall(r"`([\w.]+)`", row[1])
    ]


def resolve(name: str) -> Any:
    """What a name in a table means.

    Raises:
        AttributeError: hvdlite has no such name.
    """
    if name.startswith(OPTIMIZER):
        methods = vars(inspect.getmodule(hvdlite.DistributedOptimizer))["GradientOptimizer"]
        return inspect.getattr_static(methods, name.removeprefix(OPTIMIZER))
    thing: Any = hvdlite
    for part in name.split("."):
        thing = inspect.getattr_static(thing, part)
    return thing


def directives(names: list[tuple[str, str]]) -> str:
    """What has Sphinx show the signatures and docstrings."""
    entries = "\n\n".join(_entry(name, text) for name, text in names)
    return f"```{{eval-rst}}\n.. currentmodule:: hvdlite\n\n{entries}\n```"


def _entry(name: str, text: str) -> str:
    thing = resolve(name)
    is_member = "." in name and not name.startswith(("errors.", "recipes."))
    if name.startswith(OPTIMIZER):
        return _method(name, thing)
    if isinstance(thing, property):
        return f".. autoproperty:: {name}"
    if inspect.isfunction(thing):
        return f".. automethod:: {name}" if is_member else f".. autofunction:: hvdlite.{name}"
    if inspect.isclass(thing) and not is_member:
        kind = "exception" if issubclass(thing, BaseException) else "class"
        return f".. auto{kind}:: hvdlite.{name}\n   :show-inheritance:"
    kind = "attribute" if is_member else "data"
    return f".. py:{kind}:: {name}\n\n   {_as_rst(text)}"


def _method(name: str, thing: Any) -> str:
    """A method of what DistributedOptimizer returns, as `optimizer.step(...)`."""
    # Here, as the tests that list the names need no Sphinx.
    napoleon: Any = importlib.import_module("sphinx.ext.napoleon")

    if isinstance(thing, property):
        head, doc = f".. py:attribute:: {name}", inspect.getdoc(thing.fget)
    else:
        parameters = list(inspect.signature(thing, eval_str=True).parameters.values())[1:]
        signature = inspect.Signature(parameters)
        head, doc = f".. py:method:: {name}{signature}", inspect.getdoc(thing)
    lines = str(
        napoleon.GoogleDocstring(with_code(doc or ""), napoleon.Config(napoleon_use_rtype=False))
    )
    return f"{head}\n\n{textwrap.indent(lines, '   ')}"


def with_code(doc: str) -> str:
    """A docstring in which what begins with a dot, as `.grad`, is code: it would lose the dot as a
    name."""
    return re.sub(r"(?<!`)`(\.[^`]+)`(?!`)", r"``\1``", doc)


def _as_rst(text: str) -> str:
    """A table's cell: Markdown's code and RST's names have the same marks; links become text."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
