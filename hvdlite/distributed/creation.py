"""Makes process groups: what torch.distributed calls for the backend "hvdlite"."""

from __future__ import annotations

import collections
import functools
import hashlib
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from hvdlite.distributed import arrivals
from hvdlite.distributed.process_group import HvdliteProcessGroup
from hvdlite.errors import LaunchError
from hvdlite.world import starting, world
from hvdlite.world.teams.groups import make_group

# How many groups of each name and these ranks this process has made: a name may come again after
# destroy_process_group. All members of a group count alike, whatever other groups each is in.
_made: collections.Counter[tuple[str, tuple[int, ...]]] = collections.Counter()


def create_process_group(options: Any, backend_options: Any = None) -> HvdliteProcessGroup:
    """The group of a `_DistributedBackendOptions`. Its members call it; returns when all have.

    The first group begins the world unless `hvdlite.init()` has. It has all ranks; the default
    group may be of another backend.

    Raises:
        LaunchError: The processes are no world of this size; or the first group lacks ranks.
    """
    timeout_s = options.timeout.total_seconds()
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    is_default = not options.global_ranks_in_group
    if is_default or not world.is_initialized():
        num_ranks = options.group_size if is_default else dist.get_world_size()
        if len(ranks) < num_ranks:
            raise LaunchError(
                f"the first process group of hvdlite has {len(ranks)} of {num_ranks} ranks, but "
                "all of them must begin hvdlite's world; call hvdlite.init() on every rank, or "
                "make a group of all ranks before"
            )
        starting.begin_with_store(options.store, ranks[options.group_rank], num_ranks, timeout_s)
    name = str(options.group_id)
    # torch's store of a group has its name as a prefix, see `_agreed`.
    is_agreed = is_default or _agreed(name, ranks) == name
    store = options.store if is_agreed else dist.distributed_c10d._get_default_store()
    return _make(store, ranks, range(len(ranks)), name, timeout_s)


def _make(
    store: Any, world_ranks: Sequence[int], members: Sequence[int], name: str, timeout_s: float
) -> HvdliteProcessGroup:
    """members: the group's ranks, as indices of `world_ranks`."""
    ranks = [world_ranks[member] for member in members]
    called = _agreed(name, ranks)
    key = _next_key(called, ranks)
    prefixed = None if store is None else PrefixStore(f"{key}/", store)
    if prefixed is not None and world.current().mpi_runtime is not None and len(ranks) > 1:
        arriving = PrefixStore("arrivals/", prefixed)
        own = ranks.index(world.rank())
        arrivals.wait_for_all(arriving, own, ranks, called, timeout_s)
    team = make_group(ranks, key, timeout_s)
    return HvdliteProcessGroup(
        team,
        timeout_s,
        prefixed,
        name,
        called,
        _nccl_maker(prefixed, team.rank, team.size, timeout_s, name, ranks),
        functools.partial(_make, store, ranks),
    )


def _agreed(name: str, ranks: Sequence[int]) -> str:
    """What all members call a group. With use_local_synchronization torch names it by a hash of its
    ranks and of how many groups this process has, which differs between members."""
    if not re.fullmatch("[0-9a-f]{40}", name):
        return name
    return "ranks " + ",".join(map(str, ranks[:8])) + ",..." * (len(ranks) > 8)


def _next_key(name: str, ranks: Sequence[int]) -> str:
    """The same on all members of a group, another one for each group that is made."""
    counted = name, tuple(ranks)
    _made[counted] += 1
    which = hashlib.sha256(repr(counted).encode()).hexdigest()[:16]
    return f"{name}#{_made[counted]}.{which}"


def _nccl_maker(
    store: Any, rank: int, size: int, timeout_s: float, name: str, ranks: Sequence[int]
) -> Callable[[], Any] | None:
    """Makes NCCL's backend of a group; None where torch has no NCCL, or no GPU."""
    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        return None

    def make() -> Any:
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        options.global_ranks_in_group = list(ranks)
        options.group_name = name
        backend = dist.ProcessGroupNCCL(PrefixStore("cuda/", store), rank, size, options)
        backend._set_sequence_number_for_group()
        return backend

    return make
