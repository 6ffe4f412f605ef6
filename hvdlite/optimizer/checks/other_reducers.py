"""Whether torch's DDP or FSDP also reduces an optimizer's gradients, which would then depend on the
order in which both come to a gradient.

hvdrun sets RANK and WORLD_SIZE; libraries that find them in the environment may wrap the model.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


def require_no_other_reducer(params: Sequence[torch.Tensor]) -> None:
    """If torch.distributed is initialized, it looks through all objects of the process; otherwise
    it costs nothing.

    Raises:
        RuntimeError: A live module reduces gradients of these parameters over several processes.
    """
    for name, size in _other_reducers(params):
        raise RuntimeError(
            f"DistributedOptimizer: {name} reduces the same gradients over {size} processes, and "
            f"both would change them in an order that depends on timing; remove {name} or "
            "DistributedOptimizer (a library may have wrapped the model because it found RANK and "
            "WORLD_SIZE in the environment)"
        )


def _other_reducers(params: Sequence[torch.Tensor]) -> Iterator[tuple[str, int]]:
    """The class of each other reducer, and its number of processes."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    # If it was never imported, there are no DTensors, which fully_shard makes of the parameters.
    made: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    for param in params:
        if isinstance(param, made) and (size := param.device_mesh.size()) > 1:
            yield "fully_shard (FSDP2)", size
    # If it was never imported, nothing is sharded.
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    kinds = (DistributedDataParallel, fsdp) if fsdp else (DistributedDataParallel,)
    ours = {id(param) for param in params if param.requires_grad}
    # By type, not by isinstance: asking an object for its class may run any code. Each type is
    # tested once, as testing for DDP is slow.
    objects = gc.get_objects()
    found = {kind for kind in set(map(type, objects)) if issubclass(kind, kinds)}
    for module in [thing for thing in objects if type(thing) in found] if found else ():
        group = getattr(module, "process_group", None)
        if group is None or group.size() == 1:
            continue
        if any(id(param) in ours for param in module.parameters()):
            yield type(module).__name__, group.size()
