"""Whether torch's DDP or FSDP also reduces an optimizer's gradients, which would then depend on the
order in which both come to a gradient.

hvdrun sets RANK and WORLD_SIZE; libraries that find them in the environment may wrap the model.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel


def require_no_other_reducer(params: Sequence[torch.Tensor]) -> None:
    """If torch.distributed is initialized, it looks through all objects of the process; otherwise
    it costs nothing.

    Raises:
        RuntimeError: A live module reduces gradients of these parameters over several processes.
    """
    other = _other_reducer(params)
    if other is None:
        return
    name, size = other
    raise RuntimeError(
        f"DistributedOptimizer: {name} "
        f"reduces the same gradients over {size} processes, and both would change them "
        f"in an order that depends on timing; remove {name} or "
        "DistributedOptimizer (a library may have wrapped the model because it found RANK and "
        "WORLD_SIZE in the environment)"
    )


def _other_reducer(params: Sequence[torch.Tensor]) -> tuple[str, int] | None:
    """The class of the other reducer, and its number of processes; None if there is none."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    # If it was never imported, there are no DTensors, which fully_shard makes of the parameters.
    made: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    for param in params:
        if isinstance(param, made) and (size := param.device_mesh.size()) > 1:
            return "fully_shard (FSDP2)", size
    kinds: tuple[type[torch.nn.Module], ...] = (DistributedDataParallel,)
    # If it was never imported, nothing is sharded.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        kinds += (fsdp.FullyShardedDataParallel,)
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
            return type(module).__name__, group.size()
    return None
