"""Whether something else reduces an optimizer's gradients, too: torch's DDP or FSDP.

Libraries that find RANK and WORLD_SIZE in the environment, where hvdrun puts them, may wrap the
model by themselves.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Sequence

import torch
from torch.nn.parallel import DistributedDataParallel


def warn_of_other_reducers(params: Sequence[torch.Tensor]) -> None:
    """Warns where a live module reduces gradients of these parameters over several processes.

    It looks through all objects of the process where there is a process group, and else costs
    nothing.
    """
    other = _other_reducer(params)
    if other is None:
        return
    name, size = other
    warnings.warn(
        f"DistributedOptimizer: {name} reduces the same gradients over {size} processes, so that "
        f"they are reduced twice; use one of the two: leave {name} out (a library that wraps the "
        "model by itself finds RANK and WORLD_SIZE in the environment), or DistributedOptimizer",
        stacklevel=2,
    )


def _other_reducer(params: Sequence[torch.Tensor]) -> tuple[str, int] | None:
    """Its class, and its number of processes."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    kinds: tuple[type[torch.nn.Module], ...] = (DistributedDataParallel,)
    # Nobody has sharded anything where this was never imported.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        kinds += (fsdp.FullyShardedDataParallel,)
    ours = {id(param) for param in params if param.requires_grad}
    # By its type: other objects may do anything where they are asked for their class. Each type is
    # asked once, as DDP's is slow to answer.
    objects = gc.get_objects()
    found = {kind for kind in set(map(type, objects)) if issubclass(kind, kinds)}
    for module in [thing for thing in objects if type(thing) in found] if found else ():
        group = getattr(module, "process_group", None)
        if group is None or group.size() == 1:
            continue
        if any(id(param) in ours for param in module.parameters()):
            return type(module).__name__, group.size()
    return None
