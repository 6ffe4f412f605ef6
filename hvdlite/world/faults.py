"""Faults on purpose (HVDLITE_FAULT): those of this rank, and how those of operations happen.

Nothing is installed without the variable. With it, the team's bound methods are replaced by ones
that count the operations first.
"""

from __future__ import annotations

import collections
import functools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hvdlite import _core
from hvdlite.errors import ConfigError
from hvdlite.world.config import Config
from hvdrun.for_hvdlite import CORE, FAULT_VARIABLE, OPERATION, Fault, parse_faults

if TYPE_CHECKING:
    from hvdlite.world.teams.team import Team

log = logging.getLogger("hvdlite")

# By fault, how many of its events this process has seen: teams and worlds count on.
_seen: collections.Counter[int] = collections.Counter()
_lock = threading.Lock()

# The kinds that happen in the core, which counts them, by the numbers that it has for them.
_IN_CORE = ("drop", "fail-mpi", "fail-alloc")
# Those that the core has now, and of which rank.
_cores: tuple[tuple[Fault, ...], int] = (), -1


@functools.cache
def _parsed(text: str) -> tuple[Fault, ...]:
    """Once for each text, as `_seen` counts for these objects, which must not be freed."""
    return parse_faults(text)


def of_rank(config: Config, rank: int) -> list[Fault]:
    """Those that concern a rank of the world.

    Raises:
        ConfigError: The variable can't be parsed.
    """
    if not config.fault:
        return []
    try:
        faults = _parsed(config.fault)
    except ValueError as error:
        raise ConfigError(f"{FAULT_VARIABLE}: {error}") from None
    return [fault for fault in faults if fault.rank in (-1, rank)]


def say(fault: Fault, rank: int, where: str) -> None:
    """One line for each fault that happens. where: it happens."""
    log.warning("%s: %s on rank %d, on purpose: %s", FAULT_VARIABLE, fault.kind, rank, where)


def happen(fault: Fault, rank: int, where: str) -> None:
    """What a fault of the whole process does.

    Raises:
        RuntimeError: The fault is `raise`.
    """
    say(fault, rank, where)
    if fault.kind == "delay":
        time.sleep(float(fault.value))
    elif fault.kind == "raise":
        raise RuntimeError(f"{FAULT_VARIABLE} has raised this on purpose: rank {rank}, {where}")
    elif fault.kind == "exit":
        os._exit(int(fault.value))
    else:
        os.kill(os.getpid(), signal.SIGSTOP if fault.kind == "stop" else signal.SIGKILL)


def put_into_core(config: Config, rank: int) -> None:
    """Gives the core the faults that happen in it, before the first engine of a world is made. As
    long as the text is the same, they are counted on from world to world."""
    global _cores
    found = tuple(fault for fault in of_rank(config, rank) if fault.place is CORE)
    if _cores[0] == found and (_cores[1] == rank or not found):
        return
    _cores = found, rank
    given = [(_IN_CORE.index(each.kind), each.call, each.nth, each.times) for each in found]
    _core.fail_on_purpose(tuple(given), rank)


def put_into(team: Team, config: Config) -> Team:
    """Gives a new team the faults of its operations, if this rank has any; returns the team."""
    rank = team.ranks[team.rank]
    found = [fault for fault in of_rank(config, rank) if fault.place is OPERATION]
    if found:
        _Operations(team, found, rank)
    return team


class _Operations:
    """The methods that replace a team's own."""

    def __init__(self, team: Team, faults: list[Fault], rank: int) -> None:
        self._faults = faults
        self._rank = rank
        self._post, self._run, self._plan = team.post, team.run, team.plan
        team.post, team.run, team.plan = self.post, self.run, self.plan
        # The core's short way. Callers go the other way when it refuses.
        team.run_allreduce = lambda *_: NotImplemented

    def before(self, operation: str, name: str) -> None:
        for fault in self._faults:
            if fault.operation in ("", operation) and fault.name in ("", name) and _is_due(fault):
                happen(fault, self._rank, f"{operation} {name!r}")

    def post(self, posting: _core.Posting, *args: Any) -> _core.Operation:
        self.before(_core.KIND_NAMES[posting.kind], posting.name)
        return self._post(posting, *args)

    def run(self, posting: _core.Posting, *args: Any) -> str | None:
        self.before(_core.KIND_NAMES[posting.kind], posting.name)
        return self._run(posting, *args)

    def plan(self, name: str, *args: Any, **options: Any) -> Any:
        plan = self._plan(name, *args, **options)
        return _Plan(plan, functools.partial(self.before, "allreduce", name))


class _Plan:
    """A plan each run of which counts as an allreduce of its name."""

    def __init__(self, plan: _core.Plan, before: Callable[[], None]) -> None:
        self._plan = plan
        self._before = before

    def start(self, *args: Any) -> _core.Operation:
        self._before()
        return self._plan.start(*args)


def _is_due(fault: Fault) -> bool:
    """Counts one more event that a fault is about: whether it happens now."""
    with _lock:
        _seen[id(fault)] += 1
        return fault.nth <= _seen[id(fault)] < fault.nth + fault.times
