#!/usr/bin/env python3
"""Writes down what Horovod's PyTorch API and horovodrun offer: names, parameters, defaults, flags.

    tools/horovod_api.py UNPACKED_SDIST > docs/horovod-0.28.1.json

The sources are parsed, never imported, and nothing but those facts is taken from them. A name
stands as a user writes it after `hvd.`, with the parameters of what its imports lead to. Keys:

    horovod     the version
    torch       the names in horovod.torch, and what belongs to its classes
    submodules  what only the modules below horovod.torch have
    package     the names in horovod itself
    flags       of horovodrun: spellings, what each takes, the default that its help states, and the
                variable by which its value reaches the ranks
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = "horovod.torch"
LAUNCHER = "horovod.runner.launch"
VARIABLES = "horovod.runner.common.util.config_parser"

Facts = dict[str, str]
Names = dict[str, Facts]


class Found(NamedTuple):
    """What a name stands for, and the module that defines it. A module has no node."""

    module: str
    node: ast.stmt | None


class Sources:
    """The modules of an unpacked sdist, and how their names lead to each other."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._bindings: dict[str, dict[str, ast.stmt]] = {}

    def path(self, module: str) -> Path | None:
        base = self.root.joinpath(*module.split("."))
        return next(
            (p for p in (base / "__init__.py", base.with_suffix(".py")) if p.exists()), None
        )

    def modules_below(self, package: str) -> list[str]:
        folder = self.root.joinpath(*package.split("."))
        paths = [p.parent if p.name == "__init__.py" else p for p in folder.rglob("*.py")]
        parts = [path.relative_to(self.root).with_suffix("").parts for path in paths]
        return sorted({".".join(p) for p in parts} - {package})

    def tree(self, module: str) -> ast.Module:
        path = self.path(module)
        if path is None:
            raise SystemExit(f"{self.root} has no module {module}; expected an unpacked sdist")
        return ast.parse(path.read_text(), filename=str(path))

    def bindings(self, module: str) -> dict[str, ast.stmt]:
        """The statement that binds each top-level name, also inside of `if` and `try`."""
        if module not in self._bindings:
            nodes = list(_flat(self.tree(module).body))
            self._bindings[module] = {name: node for node in nodes for name in _bound(node)}
        return self._bindings[module]

    def find(self, module: str, name: str) -> Found | None:
        """Follows imports and `x = instance.method`. None where they lead out of the sdist."""
        node = self.bindings(module).get(name)
        submodule = f"{module}.{name}"
        if self.path(submodule) and (node is None or isinstance(node, ast.ImportFrom)):
            return Found(submodule, None)
        if isinstance(node, ast.ImportFrom):
            original = next(a.name for a in node.names if (a.asname or a.name) == name)
            source = node.module or ""
            return self.find(source, original) if self.path(source) else None
        if node is None or isinstance(node, ast.Import):
            return None
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
            owner = self.class_of(module, node.value.value)
            if owner is not None and node.value.attr in (methods := self.methods(owner)):
                return Found(owner.module, methods[node.value.attr])
        return Found(module, node)

    def find_dotted(self, package: str, name: str) -> Found | None:
        """The same for `module.name` below a package. None for what belongs to a class."""
        *inner, last = name.split(".")
        module = ".".join([package, *inner])
        return self.find(module, last) if self.path(module) else None

    def class_of(self, module: str, value: ast.expr) -> Found | None:
        """The class of a name that was bound by `name = Class(...)`."""
        node = self.bindings(module).get(value.id) if isinstance(value, ast.Name) else None
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
            return None
        return self.find(module, ast.unparse(node.value.func))

    def classes(self, found: Found) -> list[ast.ClassDef]:
        """A class and those of its bases that are in the sdist."""
        assert isinstance(found.node, ast.ClassDef)
        above = [self.find(found.module, ast.unparse(base)) for base in found.node.bases]
        return [found.node, *(cls for base in above if base for cls in self.classes(base))]

    def methods(self, found: Found) -> dict[str, ast.FunctionDef]:
        bodies = [cls.body for cls in reversed(self.classes(found))]
        return {n.name: n for body in bodies for n in body if isinstance(n, ast.FunctionDef)}

    def describe(self, name: str, found: Found) -> Names:
        """A name, and what belongs to it."""
        if found.node is None:
            return {name: {"kind": "module"}}
        if isinstance(found.node, ast.ClassDef):
            return self._describe_class(name, found)
        if not isinstance(found.node, ast.FunctionDef):
            return {name: {"kind": "value"}}
        function = self._forwarded(found.module, found.node)
        # A function that copies `Class.__dict__` makes classes that have what Class has.
        members: Names = {}
        for part in ast.walk(function):
            if isinstance(part, ast.Attribute) and part.attr == "__dict__":
                copied = self.find(found.module, ast.unparse(part.value))
                assert copied is not None, ast.unparse(part)
                members = {**self._describe_class(name, copied), **members}
        return {**members, name: {"kind": "function", "parameters": parameters(function)}}

    def _describe_class(self, name: str, found: Found) -> Names:
        classes, methods = self.classes(found), self.methods(found)
        bases = [ast.unparse(base) for cls in classes for base in cls.bases]
        own = {"kind": "exception" if any("Error" in base for base in bases) else "class"}
        if "__init__" in methods:
            own["parameters"] = parameters(methods["__init__"], bound=True)
        described = {name: own}
        if any(base.split(".")[-1] == "Function" for base in bases):
            return described  # of autograd: its methods are for autograd alone
        for cls in reversed(classes):
            values = [v for node in cls.body if isinstance(node, ast.Assign) for v in _bound(node)]
            described |= {f"{name}.{v}": {"kind": "value"} for v in filter(_public, values)}
        for method in filter(_public, methods):
            node = methods[method]
            static = any(ast.unparse(d) == "staticmethod" for d in node.decorator_list)
            text = parameters(node, bound=not static)
            described[f"{name}.{method}"] = {"kind": "function", "parameters": text}
        return described

    def _forwarded(self, module: str, node: ast.FunctionDef) -> ast.FunctionDef:
        """Of `def f(*args, **kwargs): instance.g(*args, **kwargs)`: g, which has the parameters."""
        if parameters(node) == "*args, **kwargs":
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                    owner = self.class_of(module, call.func.value)
                    if owner is not None:
                        return self.methods(owner)[call.func.attr]
        return node


def parameters(node: ast.FunctionDef, bound: bool = False) -> str:
    """The parameters with their defaults and without types; of a bound method without `self`."""
    bound = bound or (node.args.args[:1] != [] and node.args.args[0].arg == "self")
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    text = ast.unparse(node.args)
    return text.partition(", ")[2] if bound else text


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            yield from _flat(node.body)


def _bound(node: ast.stmt) -> list[str]:
    """The names that a statement binds."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name for alias in node.names]
    return []


def _public(name: str) -> bool:
    return name == "__version__" or not name.startswith("_")


def _literal(sources: Sources, module: str, name: str) -> object:
    node = sources.bindings(module)[name]
    assert isinstance(node, ast.Assign), name
    return ast.literal_eval(node.value)


def torch_names(sources: Sources) -> Names:
    below = [module.removeprefix(f"{PACKAGE}.") for module in sources.modules_below(PACKAGE)]
    names = [*sources.bindings(PACKAGE), *below]
    exported = _literal(sources, f"{PACKAGE}.elastic", "__all__")
    assert isinstance(exported, list)
    names += [f"elastic.{name}" for name in exported]
    described: Names = {}
    for name in filter(_public, names):
        found = sources.find_dotted(PACKAGE, name)
        described |= sources.describe(name, found) if found else {}
    return described


def submodule_names(sources: Sources) -> Names:
    """What a module below horovod.torch defines, and horovod.torch does not have by its name."""
    has = [sources.find_dotted(PACKAGE, name) for name in torch_names(sources)]
    nodes = [found.node for found in has if found]
    described: Names = {}
    for module in sources.modules_below(PACKAGE):
        for name, node in sources.bindings(module).items():
            if not _public(name) or isinstance(node, (ast.Import, ast.ImportFrom)):
                continue
            found = sources.find(module, name)
            if found is not None and found.node not in nodes:
                described |= sources.describe(f"{module.removeprefix(PACKAGE + '.')}.{name}", found)
    return described


def package_names(sources: Sources) -> Names:
    described: Names = {}
    for name in filter(_public, sources.bindings("horovod")):
        found = sources.find("horovod", name)
        described |= sources.describe(name, found) if found else {}
    return described


def flags(sources: Sources) -> list[Facts]:
    """Every argument of horovodrun, by its longest spelling."""
    tree = sources.tree(LAUNCHER)
    factories = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
    variables = variables_by_destination(sources)
    # argparse adds it where nobody says otherwise.
    found = [{"flag": "--help", "spellings": "-h --help", "takes": "nothing"}]
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(".add_argument"):
            found.append(_flag(sources, call, factories, variables))
    return sorted(found, key=lambda facts: facts["flag"])


def _flag(
    sources: Sources,
    call: ast.Call,
    factories: dict[str, ast.FunctionDef],
    variables: dict[str, str],
) -> Facts:
    spellings = [str(ast.literal_eval(argument)) for argument in call.args]
    options = {keyword.arg: keyword.value for keyword in call.keywords}
    flag = max(spellings, key=len)
    destination = flag.lstrip("-").replace("-", "_")
    if "dest" in options:
        destination = ast.literal_eval(options["dest"])
    help = options.get("help")
    text = str(help.value) if isinstance(help, ast.Constant) else ""
    facts = {"flag": flag, "spellings": " ".join(spellings)}
    facts["takes"] = _takes(sources, options, factories)
    if default := re.search(r"default(?: value is|:) ([\w.]+)", text):
        facts["default"] = default[1].rstrip(".")
    named = re.search(r"environment variable (HOROVOD_\w+)", text)
    if variable := named[1] if named else variables.get(destination):
        facts["variable"] = variable
    return facts


def _takes(
    sources: Sources, options: dict[str | None, ast.expr], factories: dict[str, ast.FunctionDef]
) -> str:
    action = ast.unparse(options["action"]) if "action" in options else "'store'"
    count = ast.unparse(options["nargs"]) if "nargs" in options else "1"
    if action in ("'store_true'", "'version'") or _takes_nothing(action, factories):
        return "nothing"
    if count == "argparse.REMAINDER":
        return "the rest"
    if "choices" in options:
        module, name = ast.unparse(options["choices"]).split(".")
        imported = sources.find(LAUNCHER, module)
        assert imported is not None, module
        choices = _literal(sources, imported.module, name)
        assert isinstance(choices, list)
        return " ".join(choices)
    kind = ast.unparse(options["type"]) if "type" in options else "text"
    return {"0": "nothing", "1": kind}.get(count, f"{count} {kind}")


def _takes_nothing(action: str, factories: dict[str, ast.FunctionDef]) -> bool:
    """Whether the actions that `make_..._action(...)` makes have nargs=0."""
    factory = factories.get(action.partition("(")[0])
    if factory is None:
        return False
    calls = [part for part in ast.walk(factory) if isinstance(part, ast.Call)]
    counts = [k.value for call in calls for k in call.keywords if k.arg == "nargs"]
    if counts:
        return all(ast.unparse(count) == "0" for count in counts)
    return any(_takes_nothing(ast.unparse(call), factories) for call in calls)


def variables_by_destination(sources: Sources) -> dict[str, str]:
    """Where horovodrun copies its arguments: the calls `_add_arg_to_env(env, VARIABLE, args.x)`."""
    found = {}
    for call in ast.walk(sources.tree(VARIABLES)):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "_add_arg_to_env":
            variable = _literal(sources, VARIABLES, ast.unparse(call.args[1]))
            used = [part.attr for part in ast.walk(call.args[2]) if isinstance(part, ast.Attribute)]
            found[used[0]] = str(variable)
    return found


def show(value: object) -> str:
    """JSON with one name or flag on a line."""
    if isinstance(value, dict) and all(isinstance(facts, dict) for facts in value.values()):
        lines = [f"    {json.dumps(k)}: {json.dumps(value[k])}" for k in sorted(value)]
        return "{\n" + ",\n".join(lines) + "\n  }"
    if isinstance(value, list):
        return "[\n" + ",\n".join(f"    {json.dumps(item)}" for item in value) + "\n  ]"
    return json.dumps(value)


def main() -> None:
    parser = argparse.ArgumentParser(description="Horovod's names, parameters and flags, as JSON.")
    parser.add_argument(
        "sdist", type=Path, help="the unpacked sdist: the folder with horovod/ in it"
    )
    sources = Sources(parser.parse_args().sdist)
    data = {
        "horovod": _literal(sources, "horovod", "__version__"),
        "torch": torch_names(sources),
        "submodules": submodule_names(sources),
        "package": package_names(sources),
        "flags": flags(sources),
    }
    print("{\n" + ",\n".join(f"  {json.dumps(k)}: {show(v)}" for k, v in data.items()) + "\n}")


if __name__ == "__main__":
    main()
