"""The same names as hvdlite's, for scripts that said `import horovod.torch as hvd`."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from hvdlite import *  # noqa: F403
from hvdlite import __all__ as __all__

if not _TYPE_CHECKING:
    from hvdlite.absent import __getattr__ as __getattr__
