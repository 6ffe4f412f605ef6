"""The map of the house, and that the house is so: which room may import from which."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"hvdlite": "hvdlite", "hvdrun": "launcher", "tests": "tests"}

# The rooms, from the ground up. Each has a name, the folders and files that are in it, and the
# rooms that it may import from, which stand above its own line. A file is in the room that names
# it most precisely.
MAP = """
machine      | launcher/machine/                      |
agent        | launcher/agent/                        | machine
knobs        | launcher/__init__.py launcher/faults.py launcher/knobs.py |
             | launcher/records.py launcher/pulse.py |
failures     | launcher/errors.py launcher/ssh_errors.py |
for_hvdlite  | launcher/for_hvdlite.py                | machine knobs
plan         | launcher/plan/                         | machine agent knobs failures
output       | launcher/output/                       | machine failures plan
preflight    | launcher/preflight/                    | machine agent failures plan
rendezvous   | launcher/rendezvous/                   | machine agent failures
reports      | launcher/reports/                      | machine knobs failures plan output
job          | launcher/job/                          | machine agent knobs failures plan output
             |                                        | reports
monitor      | launcher/monitor/                      | knobs output reports job
running      | launcher/running/                      | machine agent failures plan output job
             |                                        | monitor reports
command_line | launcher/command_line/ launcher/__main__.py |
             |                                        | knobs failures plan output preflight reports
             |                                        | job running rendezvous machine

base         | hvdlite/_core/base/                    |
kernels      | hvdlite/_core/kernels/                 | base
host         | hvdlite/_core/host/                    | base kernels
net          | hvdlite/_core/net/                     | base kernels
engine       | hvdlite/_core/engine/ hvdlite/_core/operations/ hvdlite/_core/matching/ |
             | hvdlite/_core/collectives/ hvdlite/_core/transfers/ hvdlite/_core/watching/ |
             |                                        | base kernels host net
python       | hvdlite/_core/python/                  | base kernels host engine

core         | hvdlite/_core.pyi                      |
words        | hvdlite/absent.py hvdlite/compression.py hvdlite/errors.py hvdlite/ops.py |
             | hvdlite/own_names.py hvdlite/result_tensors.py hvdlite/sites.py |
             | hvdlite/tensor_bytes.py |
             |                                        | core
world        | hvdlite/world/                         | for_hvdlite core words
gpu          | hvdlite/gpu/                           | core words world
observe      | hvdlite/observe/                       | for_hvdlite core world
collectives  | hvdlite/collectives/                   | core words world gpu observe
shared       | hvdlite/shared/                        | words world collectives
buckets      | hvdlite/optimizer/buckets/             | core words world gpu collectives observe
checks       | hvdlite/optimizer/checks/              | core words world collectives buckets shared
optimizer    | hvdlite/optimizer/                     | for_hvdlite core words world collectives
             |                                        | buckets checks observe shared
asynchronous | hvdlite/asynchronous/                  | words world collectives shared
             |                                        | optimizer
distributed  | hvdlite/distributed/                   | core words world observe collectives
api          | hvdlite/                               | for_hvdlite core words world collectives
             |                                        | checks optimizer observe shared asynchronous
report       | hvdlite/report/                        | for_hvdlite observe
recipes      | hvdlite/recipes/                       | for_hvdlite words world collectives api

harness      | tests/__init__.py tests/conftest.py tests/harness/ |
core_tests   | tests/core/                            | harness core words world
more_tests   | tests/                                 | harness core_tests
"""

# Tests may import what they test.
TESTS = {"harness", "core_tests", "more_tests"}

# So many files of the core may know each other in a circle.
LARGEST_CIRCLE = 6


class Room(NamedTuple):
    places: tuple[str, ...]
    imports: frozenset[str]


def read_map(text: str) -> dict[str, Room]:
    rooms: dict[str, Room] = {}
    name = ""
    for line in text.strip().splitlines():
        if line.strip():
            first, places, imports = (part.split() for part in line.split("|"))
            name = first[0] if first else name
            old = rooms.get(name, Room((), frozenset()))
            rooms[name] = Room(old.places + tuple(places), old.imports | set(imports))
    return rooms


ROOMS = read_map(MAP)


@functools.cache
def room_of(path: Path) -> str:
    """The room that a file is in, by the longest of the places that hold it."""
    file = path.relative_to(ROOT).as_posix()
    places = {
        place: name
        for name, room in ROOMS.items()
        for place in room.places
        if file == place or (place.endswith("/") and file.startswith(place))
    }
    assert places, f"{file} is in no room of the map"
    return places[max(places, key=len)]


def sources(*suffixes: str) -> list[Path]:
    folders = [ROOT / folder for folder in PACKAGES.values()]
    return sorted(p for folder in folders for suffix in suffixes for p in folder.rglob(suffix))


@functools.cache
def modules() -> dict[str, Path]:
    """Each module of ours by its name, packages too; and the core, whose names are in a stub."""
    found = {"hvdlite._core": ROOT / "hvdlite/_core.pyi"}
    for package, folder in PACKAGES.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[re.sub(r"\.__init__$", "", ".".join((package, *parts)))] = path
    return found


@functools.cache
def imports_of(module: str, for_types: bool = False) -> frozenset[str]:
    """The absolute names of what a module imports, also inside functions.

    for_types: also what it imports for annotations alone."""
    tree = ast.parse(modules()[module].read_text())
    if not for_types:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                node.body = []
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} has a relative import: {ast.unparse(node)}"
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            # Of `from a import b` the module a.b where there is one, else a.
            names |= members if members <= modules().keys() else {*members, str(node.module)}
    return frozenset(names)


def reached(start: str) -> set[str]:
    """All modules of ours that importing `start` leads to."""
    seen: set[str] = set()
    rest = [start]
    while rest:
        module = rest.pop()
        if module != "hvdlite._core":
            new = {name for name in imports_of(module) if name in modules()} - seen
            seen |= new
            rest += new
    return seen


@functools.cache
def includes_of(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]', path.read_text(), re.M)


def test_each_room_imports_from_rooms_above_it_in_the_map():
    above: set[str] = set()
    for name, room in ROOMS.items():
        assert room.imports <= above, name
        above.add(name)


PYTHON = sorted(name for name, path in modules().items() if path.suffix == ".py")


@pytest.mark.parametrize("module", [name for name in PYTHON if not name.startswith("tests")])
def test_a_module_imports_from_its_room_and_those_that_the_map_allows(module):
    room = room_of(modules()[module])
    used = {room_of(modules()[name]) for name in imports_of(module, True) if name in modules()}
    assert used <= {room, *ROOMS[room].imports}


@pytest.mark.parametrize("path", sources("*.c", "*.h"), ids=lambda path: path.name)
def test_a_c_file_includes_from_its_room_and_those_that_the_map_allows(path):
    core = ROOT / "hvdlite/_core"
    room = room_of(path)
    ours = [core / name for name in includes_of(path) if "/" in name and (core / name).exists()]
    if room not in TESTS:
        assert {room_of(file) for file in ours} <= {room, *ROOMS[room].imports}


def code_of(path: Path) -> str:
    """A C file without its comments."""
    return re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.S)


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """The nodes that reach each other, largest group first."""
    reach = {}
    for node in edges:
        seen: set[str] = set()
        rest = [node]
        while rest:
            new = edges[rest.pop()] - seen
            seen |= new
            rest += new
        reach[node] = seen
    groups = {tuple(sorted(n for n in reach[node] if node in reach[n])) for node in reach}
    return sorted(map(list, groups), key=len, reverse=True)


@functools.cache
def known_in_the_core() -> dict[str, set[str]]:
    """A .c with its .h is one file here. It knows those that it includes, and those whose functions
    and variables its code names, in functions of its header, too."""
    paths = sorted((ROOT / "hvdlite/_core").rglob("*.[ch]"))
    codes: dict[str, str] = {}
    for path in paths:
        codes[path.stem] = codes.get(path.stem, "") + code_of(path)
    assert len({path.parent / path.stem for path in paths}) == len(codes), "a name comes twice"
    functions = r"^(?!static\b)\w[^\n;={}]*?\b(hvdl_\w+)\([^;{}]*\)\n\{"
    variables = r"^(?!static\b|extern\b|typedef\b)[\w ]*?\b(hvdl_\w+)(?:\[\])? = "
    homes = {
        found: name
        for name, code in codes.items()
        for kind in (functions, variables)
        for found in re.findall(kind, code, re.M)
    }
    declared = re.compile(r"^(?!static\b|typedef\b)\w[^\n;={}]*?\b(hvdl_\w+)\([^;{}]*;", re.M)
    every = {found for code in codes.values() for found in declared.findall(code)}
    assert sorted(every - homes.keys()) == [], "this test does not see where these are defined"
    known = {}
    for name, code in codes.items():
        bodies = re.sub(r"^\w[^;{}=]*;", "", code, flags=re.M)  # without declarations
        used = {homes[word] for word in re.findall(r"\bhvdl_\w+", bodies) if word in homes}
        included = {Path(file).stem for file in re.findall(r'#\s*include\s+"([^"]+)"', code)}
        known[name] = (used | included) & codes.keys() - {name}
    return known


def test_files_of_the_core_know_each_other_in_small_circles_only():
    """Seen with `pytest -rP`: which they are."""
    found = [circle for circle in circles(known_in_the_core()) if len(circle) > 1]
    for circle in found:
        print(len(circle), *circle)
    assert max(map(len, found)) <= LARGEST_CIRCLE


def test_collectives_and_transfers_know_neither_each_other_nor_who_watches():
    folder = {path.stem: path.parent.name for path in (ROOT / "hvdlite/_core").rglob("*.[ch]")}
    pairs = {(folder[a], folder[b]) for a, known in known_in_the_core().items() for b in known}
    apart = {
        ("collectives", "transfers"),
        ("collectives", "watching"),
        ("transfers", "collectives"),
    }
    assert not pairs & apart


def test_no_room_may_import_what_it_does_not():
    used: dict[str, set[str]] = {name: set() for name in ROOMS}
    for module in PYTHON:
        taken = {modules()[name] for name in imports_of(module, True) if name in modules()}
        used[room_of(modules()[module])] |= {room_of(path) for path in taken}
    for path in sources("*.c", "*.h"):
        files = [ROOT / "hvdlite/_core" / name for name in includes_of(path)]
        used[room_of(path)] |= {room_of(file) for file in files if file.exists()}
    unused = {name: room.imports - used[name] for name, room in ROOMS.items() if name not in TESTS}
    assert not {name: rooms for name, rooms in unused.items() if rooms}


@pytest.mark.parametrize("module", PYTHON)
def test_no_module_reaches_itself_by_its_imports(module):
    assert module not in reached(module)


FOLDERS = sorted({path.parent for path in sources("*.py", "*.c")})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.relative_to(ROOT).as_posix())
def test_each_folder_says_what_lives_there(folder):
    init = folder / "__init__.py"
    if init.exists():
        assert ast.get_docstring(ast.parse(init.read_text()))
    else:
        rooms = (ROOT / "hvdlite/_core/README.md").read_text()
        assert f"`{folder.name}/`" in rooms


@pytest.mark.parametrize("module", [name for name in PYTHON if name.startswith("hvdrun")])
def test_the_launcher_imports_neither_hvdlite_nor_torch(module):
    roots = {name.split(".")[0] for name in imports_of(module)}
    assert not roots & {"hvdlite", "torch", "mpi4py", "numpy"}


@pytest.mark.parametrize("room", ["agent", "machine"])
def test_what_runs_beside_each_rank_needs_no_site_packages(room):
    names = [name for name in PYTHON if room_of(modules()[name]) == room]
    roots = {name.split(".")[0] for module in names for name in imports_of(module)}
    assert roots - {"hvdrun"} <= sys.stdlib_module_names


def loaded_by(statement):
    """The top-level modules that a fresh interpreter has after a statement."""
    code = f"{statement}; import sys; print(*{{m.split('.')[0] for m in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_command_line_of_hvdrun_loads_nothing_heavy():
    loaded = loaded_by("import hvdrun.command_line.cli")
    assert not loaded & {"torch", "hvdlite", "mpi4py", "numpy", "rich"}


def test_importing_hvdlite_loads_no_mpi():
    assert "mpi4py" not in loaded_by("import hvdlite")


@pytest.mark.parametrize("path", sources("*.c", "*.h"), ids=lambda path: path.name)
def test_c_knows_python_in_one_file_and_neither_mpi_nor_the_environment(path):
    if room_of(path) not in TESTS:
        assert not {name for name in includes_of(path) if name.startswith(("mpi", "torch"))}
        assert not re.search(r"\b(getenv|printf)\s*\(", path.read_text())
        assert path.name == "python_glue.h" or "Python.h" not in path.read_text()
