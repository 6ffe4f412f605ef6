"""How many bytes of data this process has sent to each rank of other hosts, over the teams of
`World.teams`. They only grow: those of a closed team stay counted, as long as the worlds that
follow have the same ranks on the same hosts.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable
from typing import Protocol

from hvdlite import _core


class Countable(Protocol):
    """What this needs of a team."""

    ranks: tuple[int, ...]
    engine: _core.Engine
    has_closed: bool


_lock = threading.Lock()
_hosts: tuple[tuple[int, ...], ...] = ()
# A team counts in one of these, never in both: both change under the lock.
_open: list[Countable] = []
_of_closed: dict[int, int] = {}  # by world rank


def count(teams: Iterable[Countable], hosts: tuple[tuple[int, ...], ...]) -> None:
    """From now on these teams, too. hosts: see `Placement`; others than before: another world."""
    global _hosts
    with _lock:
        if hosts != _hosts:
            _open.clear()
            _of_closed.clear()
            _hosts = hosts
        _open.extend(team for team in teams if not team.has_closed and team not in _open)


def closes(team: Countable) -> None:
    """Its engine is about to be closed."""
    with _lock:
        team.has_closed = True
        if team in _open:
            _open.remove(team)
            with contextlib.suppress(RuntimeError):  # a forked child
                _add(team, _of_closed)


def by_rank() -> dict[int, int]:
    """By world rank.

    Raises:
        RuntimeError: This is a forked child.
    """
    with _lock:
        found = dict(_of_closed)
        for team in _open:
            _add(team, found)
    return found


def _add(team: Countable, to: dict[int, int]) -> None:
    for member, sent in team.engine.sent_bytes().items():
        rank = team.ranks[member]
        to[rank] = to.get(rank, 0) + sent


def _after_fork_in_child() -> None:
    # Another thread may have held it.
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
