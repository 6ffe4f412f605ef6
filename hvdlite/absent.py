"""Names that Horovod has and hvdlite lacks, with the reason that their AttributeError gives."""

from __future__ import annotations

from typing import NoReturn

_IN_HVDLITE = "the contents of Horovod's module of that name are in hvdlite itself, as hvdlite."

REASONS = {
    "check_extension": (
        "it tells for which frameworks Horovod was built; hvdlite has one build, for PyTorch"
    ),
    "compression": f"{_IN_HVDLITE}Compression",
    "elastic": (
        "it has no elastic training (ranks that come and go); write checkpoints, and after a "
        "failure restart the job from the last one, with broadcast_parameters and "
        "broadcast_optimizer_state"
    ),
    "functions": f"{_IN_HVDLITE}broadcast_parameters and others",
    "mpi_ops": f"{_IN_HVDLITE}allreduce and others",
    "optimizer": f"{_IN_HVDLITE}DistributedOptimizer",
    "sync_batch_norm": f"{_IN_HVDLITE}SyncBatchNorm",
}


def __getattr__(name: str) -> NoReturn:
    """Python calls it for attributes that a module does not have; hvdlite and hvdlite.torch use
    it."""
    if name not in REASONS:
        raise AttributeError(f"hvdlite has no attribute {name!r}")
    raise AttributeError(f"hvdlite has no {name}: {REASONS[name]}")
