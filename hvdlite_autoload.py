"""Names the backend "hvdlite" to torch.distributed.

torch calls `register` at the end of its own import (entry point `torch.backends`), so that
`init_process_group("hvdlite")` works where nothing of hvdlite was imported. hvdlite itself is
loaded by the first group that asks for it.

With HVDLITE_AS_GLOO=1 torch's name "gloo" means hvdlite, too, for programs and libraries that name
Gloo and take no other name on CPUs.
"""

from __future__ import annotations

import functools
import os
from typing import Any

NAME, GLOO = "hvdlite", "gloo"
AS_GLOO = "HVDLITE_AS_GLOO"


def register() -> None:
    """Makes the name known. Never raises, as that would break `import torch`; does nothing where
    torch has no torch.distributed, or the name is known already."""
    try:
        import torch.distributed as dist

        if dist.is_available() and NAME not in dist.Backend.backend_list:
            dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
            if os.environ.get(AS_GLOO, "").strip().lower() in ("1", "true", "yes", "on"):
                _take_the_name_of_gloo(dist)
    except Exception:  # whatever it is, `init_process_group("hvdlite")` says more
        pass


def _create(*arguments: Any) -> Any:
    from hvdlite.distributed import create_process_group

    return create_process_group(*arguments)


def _take_the_name_of_gloo(dist: Any) -> None:
    """Groups that are asked for by the name "gloo" are hvdlite's, and keep that name: `get_backend`
    and torch's checks read it. Where nothing is named, CPUs get hvdlite."""
    c10d = dist.distributed_c10d
    new_group = c10d._new_process_group_helper

    @functools.wraps(new_group)
    def as_gloo(size: int, rank: int, ranks: Any, backend: Any, *rest: Any, **more: Any) -> Any:
        asked = str(backend)
        # "gloo", or as in "cpu:gloo,cuda:nccl".
        pairs = [pair.rpartition(":") for pair in asked.lower().split(",")]
        if not any(name == GLOO for _, _, name in pairs):
            return new_group(size, rank, ranks, backend, *rest, **more)
        ours = ",".join(on + colon + (NAME if name == GLOO else name) for on, colon, name in pairs)
        taken = dist.Backend(ours) if ours == NAME else ours
        group, store = new_group(size, rank, ranks, taken, *rest, **more)
        if group in c10d._world.pg_map:
            c10d._world.pg_map[group] = (backend, c10d._world.pg_map[group][1])
            c10d._world.pg_backend_config[group] = str(c10d.BackendConfig(backend))
            group.label = asked  # in the profiler: torch looks for "gloo:all_reduce" then
        return group, store

    c10d._new_process_group_helper = as_gloo
    dist.Backend.default_device_backend_map["cpu"] = NAME
