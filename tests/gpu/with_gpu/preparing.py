"""What programs on GPUs need of the interpreter that runs them; hvdlite is built with it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

from tests.gpu.with_gpu.starting import BUILD, LIBRARY, ROOT, mpiexec

# By which names the Python packages that hvdlite imports are known.
NEEDED = ("torch", "numpy", "mpi4py", "cloudpickle")
IS_SOURCE_TREE = (ROOT / "setup.py").exists()


def what_is_missing(device: str) -> str:
    """In one line, or empty."""
    interpreter = sys.executable
    if sys.version_info < (3, 10):  # noqa: UP036, as the user may name any interpreter
        return f"{interpreter} is older than Python 3.10; give another one by PYTHON=..."
    needed = (*NEEDED, "setuptools") if IS_SOURCE_TREE else (*NEEDED, "hvdlite")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        return f"{interpreter} has no {', '.join(missing)}; give another one by PYTHON=..."
    if mpiexec() is None:
        return f"no mpiexec beside {interpreter} or on PATH; install an MPI for mpi4py"
    if device == "cpu":
        return ""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"torch {torch.__version__} of {interpreter} is built without CUDA; give an "
            "interpreter with a CUDA build by PYTHON=..."
        )
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} of {interpreter} sees no GPU on this machine"
    return ""


def build() -> None:
    """hvdlite with its core, in build/gpu/lib. Outside a source tree it has to be installed."""
    if not IS_SOURCE_TREE:
        return
    command = [sys.executable, "setup.py", "--quiet", "build", "--build-base", str(BUILD)]
    subprocess.run([*command, "--build-lib", str(LIBRARY)], cwd=ROOT, check=True)
