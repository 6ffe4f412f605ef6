"""Virtual ranks (HVDLITE_DETERMINISTIC=virtual:V): a step is made of V micro-batches, whatever the
number of ranks, and each rank computes the same number of them. Without the variable every rank is
one virtual rank.

Rank r of n has the virtual ranks r·V/n … (r+1)·V/n - 1. They follow each other, so a tree over them
below the tree over the ranks is the tree over all V.
"""

from __future__ import annotations

import os

import torch

from hvdlite.world import world
from hvdlite.world.config import Config
from hvdlite.world.process import cpu_threads
from hvdlite.world.teams.process_sets import ProcessSet, global_process_set, included
from hvdrun.for_hvdlite import uneven_shares


def virtual_size(process_set: ProcessSet = global_process_set) -> int:
    """The number of virtual ranks, and so of a step's micro-batches over all ranks: V with
    HVDLITE_DETERMINISTIC=virtual:V; else the number of ranks.

    Raises:
        NotInitializedError: (a ValueError) before `init`.
        ValueError: The process set is not registered, or its size does not divide V.

    Example:
        On two ranks, without the variable:

        >>> hvd.virtual_size()
        2
    """
    return virtual_micro_batches(process_set) * len(_members("virtual_size", process_set))


def virtual_micro_batches(process_set: ProcessSet = global_process_set) -> int:
    """How many micro-batches each rank computes per step, one backward each: V divided by the
    number of ranks; 1 without HVDLITE_DETERMINISTIC=virtual:V. Raises as `virtual_size`.

    Example:
        Without the variable:

        >>> hvd.virtual_micro_batches()
        1
    """
    members = _members("virtual_micro_batches", process_set)
    return micro_batches(world.current().config, len(members)) or 1


def virtual_ranks(process_set: ProcessSet = global_process_set) -> range:
    """The virtual ranks of this rank, in the order in which it computes their micro-batches; they
    follow from this rank's number among the members of the process set. Raises like `virtual_size`,
    and a ValueError if this rank is no member.

    Example:
        On rank 0, without the variable:

        >>> list(hvd.virtual_ranks())
        [0]
    """
    each = virtual_micro_batches(process_set)
    number = process_set.rank()
    if number is None:
        raise ValueError(
            f"virtual_ranks: rank {world.rank()} is no member of process_set={process_set!r}; "
            "only members have virtual ranks in it"
        )
    return range(number * each, (number + 1) * each)


def micro_batches(config: Config, ranks: int) -> int:
    """The micro-batches of each of so many ranks in a step; 0 without virtual ranks.

    Raises:
        ValueError: The number of ranks does not divide that of the virtual ranks.
    """
    total = config.virtual_ranks
    problem = uneven_shares(total, ranks)
    if problem:
        raise ValueError(problem)
    return total // ranks


def same_threads(config: Config) -> None:
    """With virtual ranks torch computes in one thread, unless the user has chosen a number: the
    bits of a micro-batch depend on the number of threads, and a rank's share of the cores on the
    number of ranks."""
    if config.virtual_ranks and not cpu_threads.chosen_by_user(os.environ):
        torch.set_num_threads(1)


def _members(operation: str, process_set: ProcessSet) -> list[int]:
    included(operation, process_set)
    assert process_set.ranks is not None
    return process_set.ranks
