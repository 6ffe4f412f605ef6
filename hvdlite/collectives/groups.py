"""Groups: lists of tensors whose operations share one handle.

Ranks whose groups differ must get an error and not wait for each other. So every operation of a
group carries a hash of the whole group's layout. The first operation is named after the group
alone: it matches the first one of every other rank, and fails if the hashes differ. The names of
the other operations contain the hash: if it differs, they match nothing and stay pending for ever.

A later group of the same name must not match these. So the hash also includes how many operations
of this kind and name have failed. This number is the same on all ranks, as an operation fails on
all of them, and no two of a kind and name can be in flight.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

import torch

from hvdlite.collectives.posting import Unnamed, named
from hvdlite.world.teams.team import Team

_HASH = (1 << 64) - 1

Group = tuple[int, int]


def tensors_of(form: str, tensors: object) -> list[torch.Tensor]:
    """The tensors of a group, not checked one by one.

    Raises:
        ValueError: Not an iterable of tensors.
    """
    if isinstance(tensors, (torch.Tensor, str)) or not isinstance(tensors, Iterable):
        raise ValueError(f"{form}: expected a list of tensors, got {type(tensors).__name__}")
    return list(tensors)


def parts_of(
    team: Team, kind: int, name: str | None, num_tensors: int, layout: Hashable
) -> Iterator[tuple[str, Group]]:
    """Yields, for each operation of a group, its name and the `group` argument of its posting.

    layout: consists of ints and tuples only, whose hash is the same in every process.
    """
    first, unnamed = named(team, name)
    failures = 0 if unnamed else team.failures(kind, first)
    digest = hash((layout, failures) if failures else layout) & _HASH
    group = (num_tensors, digest)
    yield Unnamed(first) if unnamed else first, group
    number = 1
    while True:
        yield f"{first}[{number}] {digest:016x}", group
        number += 1
