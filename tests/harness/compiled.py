"""Compiles parts of the C core together with a test's own C file.

Objects stay in build/test-objects under a hash of all that they are made of, so that tests share
them, and a second run compiles only what has changed.
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from tests.harness.worlds import ROOT

CORE = ROOT / "hvdlite" / "_core"
KEPT = ROOT / "build" / "test-objects"
# `make sanitize` sets it: for programs, as what loads a library would need the sanitizer, too.
SANITIZER = tuple(os.environ.get("HVDLITE_TEST_SANITIZER", "").split())
OPTIONS = ("-std=c11", "-O1", "-ffp-contract=off", "-fPIC", "-pthread", f"-I{CORE}")


def sources(*names: str) -> list[Path]:
    """Those of the core, by patterns such as "kernels/reduce*"."""
    found = [path for name in names for path in sorted(CORE.glob(f"{name}.c"))]
    assert len(found) >= len(names), names
    return found


def with_core(target: Path, source: Path, *options: str) -> Path:
    """A program of a source and the core without what needs Python. options: the linker's."""
    left_out = ("exit", "allocations")  # a program has its own
    core = [
        each
        for each in sources("*/*")
        if each.stem not in left_out and each.parent.name != "python"
    ]
    objects = [compiled(each, *SANITIZER) for each in [source, *core]]
    return linked(target, objects, *SANITIZER, *options)


def linked(target: Path, objects: Iterable[Path], *options: str) -> Path:
    """A program, or with the option -shared a library."""
    subprocess.run([*_compiler(), *options, "-pthread", "-o", target, *objects], check=True)
    return target


def compiled(source: Path, *options: str) -> Path:
    """The object of one source."""
    command = [*_compiler(), *OPTIONS, *options]
    made_of = (command, _headers(CORE), _headers(source.parents[1]), source.read_bytes())
    digest = hashlib.sha256(repr(made_of).encode()).hexdigest()
    kept = KEPT / f"{source.stem}-{digest[:32]}.o"
    if not kept.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        own = kept.with_suffix(f".{os.getpid()}")  # other tests may compile it at the same time
        subprocess.run([*command, "-c", source, "-o", own], check=True)
        own.replace(kept)
    return kept


def _compiler() -> list[str]:
    return (sysconfig.get_config_var("CC") or "cc").split()


@functools.cache
def _headers(folder: Path) -> str:
    """A hash of all headers below a folder, in their order."""
    together = hashlib.sha256()
    for path in sorted(folder.rglob("*.h")):
        together.update(path.name.encode() + b"\0" + path.read_bytes())
    return together.hexdigest()
