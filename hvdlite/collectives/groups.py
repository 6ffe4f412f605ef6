"""Groups: lists of tensors whose operations share one handle.

Ranks whose groups differ must get an error and not wait for each other. So every operation of a
group carries a hash of the whole group's layout. The first operation is named after the group
alone: it matches the first one of every other rank, and fails if the hashes differ. The names of
the other operations contain the hash: if it differs, they match nothing and stay pending for ever.

A later group of the same name must not match these. So the hash also includes how many groups of
this kind and name have failed. This number is the same on all ranks, since a group fails on all of
them. A failure is counted at the latest when the next group of the name is posted: by then the one
before has ended on this rank, waited for or not, as no two of a kind and name can be in flight.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

import torch

from hvdlite.collectives.handles import Handle
from hvdlite.collectives.posting import Unnamed, named
from hvdlite.world.teams.team import Team

_HASH = (1 << 64) - 1

Group = tuple[int, int]

# So many groups that nobody has waited for are kept before the ended ones are removed.
MOST_OPEN = 64

# A group that has failed is counted once, by whichever thread looks first.
_looking_back = threading.Lock()


def tensors_of(form: str, tensors: object) -> list[torch.Tensor]:
    """The tensors of a group, not checked one by one.

    Raises:
        ValueError: Not an iterable of tensors.
    """
    if isinstance(tensors, (torch.Tensor, str)) or not isinstance(tensors, Iterable):
        raise ValueError(f"{form}: expected a list of tensors, got {type(tensors).__name__}")
    return list(tensors)


def parts_of(
    team: Team, kind: str, name: str | None, num_tensors: int, layout: Hashable
) -> Iterator[tuple[str, Group]]:
    """Yields, for each operation of a group, its name and the `group` argument of its posting.

    kind: the kind of the first operation, as the engine knows it.
    layout: consists of ints and tuples only, whose hash is the same in every process.
    """
    failures = 0
    if name is not None:
        key = (kind, name)
        _look_back(team, key)
        failures = team.failed_groups[key]
    digest = hash((layout, failures) if failures else layout) & _HASH
    group = (num_tensors, digest)
    first, unnamed = named(team, name)
    yield Unnamed(first) if unnamed else first, group
    number = 1
    while True:
        yield f"{first}[{number}] {digest:016x}", group
        number += 1


def ending(
    team: Team, kind: str, name: str | None, handles: Sequence[Handle]
) -> Callable[[], None] | None:
    """The function to call after waiting for a group of this name; handles: its operations."""
    if name is None or not handles:
        return None
    first = handles[0].operation
    key = (kind, name)
    if len(team.open_groups) >= team.most_open_groups:
        for other in list(team.open_groups):
            if team.open_groups[other].poll():
                _look_back(team, other)
        team.most_open_groups = max(MOST_OPEN, 2 * len(team.open_groups))
    team.open_groups[key] = first

    def ended() -> None:
        if team.open_groups.get(key) is first:
            _look_back(team, key)

    return ended


def _look_back(team: Team, key: tuple[str, str]) -> None:
    """Counts the last group of this kind and name, if it has ended and failed."""
    with _looking_back:
        first = team.open_groups.get(key)
        if first is not None and first.poll():
            del team.open_groups[key]
            if first.wait() is not None:  # only these have an entry
                team.failed_groups[key] += 1
