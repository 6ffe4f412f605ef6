"""Imports point one way, and what is C stays free of Python, of MPI and of the environment."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"hvdlite": ROOT / "hvdlite", "hvdrun": ROOT / "launcher"}

# From the bottom up: a module may reach those that stand before it, never those behind it.
DIRECTION = (
    "hvdlite._core",
    "hvdlite.world.world",
    "hvdlite.collectives",
    "hvdlite.optimizer.distributed",
)


def module_files():
    """By name; a package within has its own, as what its __init__ imports is reached by it."""
    return {
        re.sub(r"(\..+)\.__init__$", r"\1", ".".join((package, *parts))): path
        for package, folder in PACKAGES.items()
        for path in sorted(folder.rglob("*.py"))
        for parts in [path.relative_to(folder).with_suffix("").parts]
    }


def imports_of(module, path):
    """The absolute names of what a file imports, also inside of functions, but not for types."""
    tree = ast.parse(path.read_text(), filename=str(path))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # `from . import x` in a.b means a.x.
            base = module.split(".")[: -node.level] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            names |= {source, *(f"{source}.{alias.name}" for alias in node.names)}
    return names


@functools.cache
def graph():
    """Each module of ours with the modules of ours that it imports."""
    files = module_files()
    modules = {*files, "hvdlite._core"}
    return {module: imports_of(module, path) & modules for module, path in files.items()}


def reached(start, edges):
    """All modules that importing `start` leads to."""
    seen, rest = set(), [start]
    while rest:
        for module in edges.get(rest.pop(), ()):
            if module not in seen:
                seen.add(module)
                rest.append(module)
    return seen


@pytest.mark.parametrize("module", sorted(module_files()))
def test_no_module_reaches_itself_by_its_imports(module):
    assert module not in reached(module, graph())


@pytest.mark.parametrize(
    ("lower", "higher"), [(a, b) for i, a in enumerate(DIRECTION) for b in DIRECTION[i + 1 :]]
)
def test_imports_point_from_the_optimizer_down_to_the_core(lower, higher):
    assert higher not in reached(lower, graph())


@pytest.mark.parametrize("module", sorted(m for m in module_files() if m.startswith("hvdrun")))
def test_the_launcher_imports_neither_hvdlite_nor_torch(module):
    roots = {name.split(".")[0] for name in imports_of(module, module_files()[module])}
    assert not roots & {"hvdlite", "torch", "mpi4py", "numpy"}


@pytest.mark.parametrize("module", sorted(m for m in module_files() if m.startswith("hvdlite")))
def test_hvdlite_imports_from_one_module_of_the_launcher(module):
    assert {m for m in graph()[module] if m.startswith("hvdrun")} <= {"hvdrun.for_hvdlite"}


def loaded_by(statement):
    """The top-level modules that a fresh interpreter has after a statement."""
    code = f"{statement}; import sys; print(*{{m.split('.')[0] for m in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_command_line_of_hvdrun_loads_nothing_heavy():
    assert not loaded_by("import hvdrun.command_line.cli") & {
        "torch",
        "hvdlite",
        "mpi4py",
        "numpy",
        "rich",
    }


def test_importing_hvdlite_loads_no_mpi():
    assert "mpi4py" not in loaded_by("import hvdlite")


def c_files(*patterns):
    return sorted(p for pattern in patterns for p in (ROOT / "hvdlite/_core").rglob(pattern))


@pytest.mark.parametrize("path", c_files("*.c", "*.h"), ids=lambda path: path.name)
def test_c_knows_python_in_one_file_and_neither_mpi_nor_the_environment(path):
    text = path.read_text()
    assert not re.search(r"#\s*include\s*[<\"](mpi|torch)", text)
    assert not re.search(r"\b(getenv|printf)\s*\(", text)
    assert path.name == "python_glue.h" or "Python.h" not in text
