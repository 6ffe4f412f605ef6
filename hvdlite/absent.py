"""What Horovod has and hvdlite has not: whoever asks for it learns why."""

from __future__ import annotations

from typing import NoReturn

_IN_HVDLITE = "Horovod's module of that name; what is in it is in hvdlite itself, as hvdlite."

REASONS = {
    "check_extension": (
        "it asks for which frameworks Horovod was built; hvdlite is for PyTorch, and has one build"
    ),
    "compression": f"{_IN_HVDLITE}Compression",
    "elastic": (
        "there is no elastic training (ranks that come and go); write checkpoints, and after a "
        "failure start the job from the last one, with broadcast_parameters and "
        "broadcast_optimizer_state"
    ),
    "functions": f"{_IN_HVDLITE}broadcast_parameters and others",
    "mpi_ops": f"{_IN_HVDLITE}allreduce and others",
    "optimizer": f"{_IN_HVDLITE}DistributedOptimizer",
    "sync_batch_norm": f"{_IN_HVDLITE}SyncBatchNorm",
}


def __getattr__(name: str) -> NoReturn:
    """For modules that stand in for Horovod's: called for what they do not have."""
    if name not in REASONS:
        raise AttributeError(f"hvdlite has no attribute {name!r}")
    raise AttributeError(f"hvdlite has no {name}: {REASONS[name]}")
