"""The backend "hvdlite" of torch.distributed: PyTorch's own programs on hvdlite's engine.

Importing it registers the name; an installed hvdlite is registered by `import torch` alone.
"""

from __future__ import annotations

import sys

import hvdlite_autoload
from hvdlite import sites
from hvdlite.distributed import dynamo, operators
from hvdlite.distributed.creation import create_process_group
from hvdlite.distributed.errors import CollectiveError, OperationTimeoutError
from hvdlite.distributed.process_group import HvdliteProcessGroup

__all__ = [
    "CollectiveError",
    "HvdliteProcessGroup",
    "OperationTimeoutError",
    "create_process_group",
]

hvdlite_autoload.register()
operators.register()

for _name, _module in list(sys.modules.items()):
    if _name.startswith(f"{__name__}.") or _module is sites:
        dynamo.skip(_module)
