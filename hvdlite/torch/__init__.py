"""The same names as hvdlite's, for scripts that said `import horovod.torch as hvd`, and Horovod's
modules for scripts that import from them. The modules import only hvdlite's public names.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from hvdlite import *  # noqa: F403
from hvdlite import __all__ as __all__
from hvdlite.torch import compression as compression
from hvdlite.torch import functions as functions
from hvdlite.torch import mpi_ops as mpi_ops
from hvdlite.torch import optimizer as optimizer
from hvdlite.torch import sync_batch_norm as sync_batch_norm

if not _TYPE_CHECKING:
    from hvdlite.absent import __getattr__ as __getattr__
