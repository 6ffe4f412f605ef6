"""Horovod's `horovod.torch.mpi_ops`: the operations, and what one asks of the world."""

from hvdlite import *  # noqa: F403
from hvdlite import __all__ as __all__
