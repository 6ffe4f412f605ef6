"""What this installation can do. All but `mpi_threads_supported` work before `init`."""

from __future__ import annotations

import importlib.util
import os

import torch

from hvdlite.world import world
from hvdlite.world.bootstrap import mpi


def mpi_threads_supported() -> bool:
    """Whether MPI may be called from several threads; False in a world without MPI.

    Raises:
        ValueError: before `init`.

    Example:
        >>> hvd.mpi_threads_supported()
        True
    """
    mpi_runtime = world.current().mpi_runtime
    return mpi_runtime is not None and mpi_runtime.threads_supported()


def mpi_built() -> bool:
    """Whether there is an mpi4py to run on.

    Example:
        >>> hvd.mpi_built()
        True
    """
    return importlib.util.find_spec("mpi4py") is not None


def mpi_enabled() -> bool:
    """Whether this process's world runs on MPI; before `init`, whether it will.

    Example:
        >>> hvd.mpi_enabled()
        True
    """
    if world.active is not None:
        return world.active.mpi_runtime is not None
    return mpi.launcher_of(os.environ) is not None


def gloo_built() -> bool:
    """False: hvdlite has no Gloo.

    Example:
        >>> hvd.gloo_built()
        False
    """
    return False


def gloo_enabled() -> bool:
    """False: hvdlite has no Gloo.

    Example:
        >>> hvd.gloo_enabled()
        False
    """
    return False


def nccl_built() -> int:
    """The version of torch's NCCL, 22703 for 2.27.3; 0 if it has none.

    Example:
        >>> has_nccl = hvd.nccl_built() > 0
    """
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return 0
    major, minor, patch, *_ = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    return int(major) * 10000 + int(minor) * 100 + int(patch)


def cuda_built() -> bool:
    """Whether this torch was built for CUDA.

    Example:
        >>> hvd.cuda_built() == (torch.version.cuda is not None)
        True
    """
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether this torch was built for ROCm.

    Example:
        >>> hvd.rocm_built() == (torch.version.hip is not None)
        True
    """
    return torch.version.hip is not None


def ccl_built() -> bool:
    """False: hvdlite has no oneCCL.

    Example:
        >>> hvd.ccl_built()
        False
    """
    return False


def ddl_built() -> bool:
    """False: hvdlite has no DDL.

    Example:
        >>> hvd.ddl_built()
        False
    """
    return False
