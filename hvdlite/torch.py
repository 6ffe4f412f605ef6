"""The same names as hvdlite's, for scripts that said `import horovod.torch as hvd`."""

from hvdlite import *  # noqa: F403
from hvdlite import __all__ as __all__
