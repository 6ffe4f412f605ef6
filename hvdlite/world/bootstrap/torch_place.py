"""Where ranks without MPI meet: the Store of torch.distributed, if a process group has been made or
the variables of torchrun and its like are set.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from hvdlite.errors import LaunchError
from hvdlite.world.bootstrap.through_store import Place

# Set by torchrun, accelerate launch and their like. Any of these but the first shows that one of
# them started the process.
TORCH_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")
ADDRESS_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")

# That of a process group for which none is given.
DEFAULT_TIMEOUT_S = 1800.0

# By host and port. Kept while the process lives: others may still be asking the one of rank 0, and
# init_process_group finds it there, too.
_stores: dict[tuple[str, int], Any] = {}


def rank_of_torch(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """RANK and WORLD_SIZE, if both are there and fit together."""
    rank, size = environ.get("RANK", ""), environ.get("WORLD_SIZE", "")
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        return None
    return int(rank), int(size)


def is_known(environ: Mapping[str, str]) -> bool:
    """Whether `find` finds several ranks. Opens no Store."""
    return _default_group() is not None or _rank_at_address(environ) is not None


def _rank_at_address(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """RANK and WORLD_SIZE of several ranks whose Store has an address."""
    found = rank_of_torch(environ)
    if found is None or found[1] == 1 or not all(environ.get(n) for n in ADDRESS_VARIABLES):
        return None
    return found


def find(environ: Mapping[str, str]) -> Place | None:
    """Where the ranks of this process's job meet; None: it is alone, as far as torch knows.

    Raises:
        LaunchError: There is no Store at the address in the variables.
    """
    place = _default_group()
    if place is not None:
        return place
    found = _rank_at_address(environ)
    if found is None:
        return None
    return Place(_store(environ, *found), *found, DEFAULT_TIMEOUT_S, "init")


def _default_group() -> Place | None:
    """The Store of the default process group, of whatever backend. Its timeout counts: torch gives
    it the group's, unless the caller has made the Store."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    store: Any = dist.distributed_c10d._get_default_store()  # torch's hints lack `timeout`
    timeout_s = store.timeout.total_seconds()
    return Place(store, dist.get_rank(), dist.get_world_size(), timeout_s, "init")


def _store(environ: Mapping[str, str], rank: int, size: int) -> Any:
    """As `torch.distributed.rendezvous("env://")`, but it does not wait for the other ranks, which
    are named if they do not come."""
    from torch._C._distributed_c10d import TCPStore

    host, port = environ["MASTER_ADDR"], environ["MASTER_PORT"]
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise LaunchError(f"MASTER_PORT={port[:64]!r}: expected the number of a port")
    where = host, int(port)
    if where not in _stores:
        agents = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            _stores[where] = TCPStore(
                *where,
                size,
                is_master=rank == 0 and not agents,
                timeout=datetime.timedelta(seconds=DEFAULT_TIMEOUT_S),
                wait_for_workers=False,
                multi_tenant=True,
                use_libuv=environ.get("USE_LIBUV", "1") == "1",
            )
        except RuntimeError as error:  # torch's DistError is one
            who = "the launcher" if agents else "rank 0"
            raise LaunchError(
                f"rank {rank} of {size}: no Store of torch.distributed at MASTER_ADDR={host}, "
                f"MASTER_PORT={port}, where {who} opens it: {error}"
            ) from error
    return _stores[where]


def check_alone(environ: Mapping[str, str]) -> None:
    """Checks that a process that no launcher started is the only one of its job.

    Raises:
        LaunchError: Variables of a launcher for torch.distributed say that it is one of several,
            and not where they meet.
    """
    size = environ.get("WORLD_SIZE", "")
    seen = [f"{name}={environ[name]}" for name in TORCH_VARIABLES if environ.get(name)]
    if not size.isdecimal() or int(size) < 2 or len(seen) < 2:
        return
    raise LaunchError(
        f"{int(size)} processes were started without an MPI launcher ({', '.join(seen)}), and "
        "without all of RANK, MASTER_ADDR and MASTER_PORT, by which they could meet, so each would "
        f"be a world of one; start them with `hvdrun -np {int(size)} python train.py` (on several "
        "hosts with -H host1:4,host2:4) or with torchrun, or set HVDLITE_ALONE=1 if each should be "
        "a world of one"
    )
