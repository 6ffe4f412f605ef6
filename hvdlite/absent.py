"""Names that Horovod has and hvdlite lacks, with the reason that their errors give."""

from __future__ import annotations

import sys
from typing import NoReturn

_IN_HVDLITE = "the contents of Horovod's module of that name are in hvdlite itself, as hvdlite."
_FOR_TORCH = "hvdlite is for PyTorch only; stay with Horovod for other frameworks"

REASONS = {
    "check_extension": (
        "it tells for which frameworks Horovod was built; hvdlite has one build, for PyTorch"
    ),
    "common": (
        "the exceptions and process sets of Horovod's module of that name are in hvdlite itself, "
        "as hvdlite.HorovodInternalError and hvdlite.ProcessSet"
    ),
    "elastic": (
        "it has no elastic training (ranks that come and go); write checkpoints, and after a "
        "failure restart the job from the last one, with broadcast_parameters and "
        "broadcast_optimizer_state"
    ),
    "functions": f"{_IN_HVDLITE}broadcast_parameters and others",
    "keras": _FOR_TORCH,
    "mpi_ops": f"{_IN_HVDLITE}allreduce and others",
    "mxnet": _FOR_TORCH,
    "ray": "start the ranks with hvdrun, or from Python with hvdlite.run",
    "runner": f"{_IN_HVDLITE}run",
    "spark": "start the ranks with hvdrun, or from Python with hvdlite.run",
    "tensorflow": _FOR_TORCH,
}
_PACKAGES = ("hvdlite", "hvdlite.torch")


def __getattr__(name: str) -> NoReturn:
    """Python calls it for attributes that a module does not have; hvdlite and hvdlite.torch use
    it."""
    if name not in REASONS:
        raise AttributeError(f"hvdlite has no attribute {name!r}")
    raise AttributeError(f"hvdlite has no {name}: {REASONS[name]}")


class Finder:
    """Python asks it for modules that it has not found."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Raises ModuleNotFoundError with the reason for a module that Horovod has."""
        package, _, module = name.rpartition(".")
        if package in _PACKAGES and module in REASONS:
            # Without `name`: given it, `from hvdlite import {module}` drops this error for its own.
            raise ModuleNotFoundError(f"hvdlite has no {module}: {REASONS[module]}")


if Finder not in sys.meta_path:
    sys.meta_path.append(Finder)
