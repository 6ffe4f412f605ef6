"""Runs the GPU programs of this folder with an interpreter that has a CUDA build of torch.

`make test-gpu PYTHON=/path/to/python`. Installs nothing: the core is compiled into build/gpu, with
that interpreter, and found there by PYTHONPATH. What it needs of the interpreter: torch with CUDA,
what hvdlite imports, setuptools, and for two ranks mpi4py and an MPI.

Where something is missing, one line says what, and the exit code is 1: who calls this wants it run.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent.parent
BUILD = ROOT / "build" / "gpu"
LIMIT_S = 300
# Of the Python packages that hvdlite imports, by which each is known.
NEEDED = ("torch", "numpy", "mpi4py", "cloudpickle", "setuptools")


def main() -> int:
    """Runs everything; 0 if all of it passed."""
    lacking = what_is_missing()
    if lacking:
        print(f"make test-gpu does not run here: {lacking}", file=sys.stderr)
        return 1
    build()
    import torch

    count = torch.cuda.device_count()
    print(f"torch {torch.__version__}, {count} x {torch.cuda.get_device_name(0)}", flush=True)
    # A rank on a GPU of its own uses NCCL; two on one GPU stage. Where there are more GPUs, NCCL
    # runs between them.
    runs = [("nccl", 1, {}), ("staged", 2, {"HVDLITE_GPU": "0"})]
    if count > 1:
        runs.append(("nccl", count, {}))
    else:
        print("one GPU: NCCL between GPUs is not run", flush=True)
    failed = []
    for way, ranks, knobs in runs:
        for program in sorted(Path(__file__).parent.glob("check_*.py")):
            title = f"{program.stem}, {ranks} rank{'s' if ranks > 1 else ''}, {way}"
            code = run(program, ranks, {"HVDLITE_GPU_COLLECTIVES": way, **knobs})
            print(f"{'passed' if not code else f'FAILED ({code})'}: {title}", flush=True)
            failed += [title] if code else []
    return 1 if failed else 0


def what_is_missing() -> str:
    """In one line, or empty."""
    interpreter = sys.executable
    if sys.version_info < (3, 10):  # noqa: UP036, as the user may name any interpreter
        return f"{interpreter} is older than Python 3.10; give another one by PYTHON=..."
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return f"{interpreter} has no {', '.join(missing)}; give another one by PYTHON=..."
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"torch {torch.__version__} of {interpreter} is built without CUDA; give an "
            "interpreter with a CUDA build by PYTHON=..."
        )
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} of {interpreter} sees no GPU on this machine"
    if mpiexec() is None:
        return f"no mpiexec beside {interpreter} or on PATH; install an MPI for mpi4py"
    return ""


def mpiexec() -> str | None:
    """The launcher of the interpreter's environment, or of the system."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def build() -> None:
    """hvdlite with its core, in build/gpu/lib."""
    command = [sys.executable, "setup.py", "--quiet", "build", "--build-base", str(BUILD)]
    subprocess.run([*command, "--build-lib", str(BUILD / "lib")], cwd=ROOT, check=True)


def run(program: Path, ranks: int, knobs: dict[str, str]) -> int:
    """The exit code of the program on so many ranks."""
    environment = {
        **os.environ,
        **knobs,
        "PYTHONPATH": f"{BUILD / 'lib'}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(program)]
    if ranks > 1:
        launcher = mpiexec()
        assert launcher is not None
        version = subprocess.run([launcher, "--version"], capture_output=True, text=True).stdout
        # Open MPI refuses root, and more ranks than cores.
        lenient = ["--oversubscribe", "--allow-run-as-root", "--bind-to", "none"]
        is_open_mpi = any(word in version for word in ("Open MPI", "OpenRTE", "prte", "PRRTE"))
        command = [launcher, "-n", str(ranks), *(lenient if is_open_mpi else []), *command]
    try:
        return subprocess.run(command, env=environment, timeout=LIMIT_S).returncode
    except subprocess.TimeoutExpired:
        return 124


if __name__ == "__main__":
    sys.exit(main())
