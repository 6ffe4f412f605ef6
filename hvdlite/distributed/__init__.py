"""The backend "hvdlite" of torch.distributed: PyTorch's own programs on hvdlite's engine.

Importing it registers the name; an installed hvdlite is registered by `import torch` alone.
"""

from __future__ import annotations

import hvdlite_autoload
from hvdlite import sites
from hvdlite.distributed import (
    arguments,
    arrivals,
    collectives,
    creation,
    cuda_calls,
    dynamo,
    futures,
    monitored_barrier,
    operators,
    point_to_point,
    postings,
    process_group,
    spans,
    sparse,
    work,
)
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

for _module in (
    *(arguments, arrivals, collectives, creation, cuda_calls, futures, monitored_barrier),
    operators,
    *(point_to_point, postings, process_group, sites, spans, sparse, work),
):
    dynamo.skip(_module)
