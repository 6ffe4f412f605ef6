"""Checks the number of servers (--servers) before the start, as each rank would."""

from __future__ import annotations

from collections.abc import Mapping

from hvdrun.errors import UsageError
from hvdrun.knobs import MOST_DIGITS
from hvdrun.plan.local_facts import LocalFacts
from hvdrun.plan.request import Request

_VARIABLE = "HVDLITE_SERVERS"


def check(request: Request, facts: LocalFacts) -> None:
    """Raises UsageError if no process is left to be a worker. A variable that is no number is an
    error of `hvdlite.init`."""
    number, num_proc = servers_of(request, facts.environ), request.num_proc
    if num_proc and number >= num_proc:
        what = "--servers" if _VARIABLE in request.settings else f"{_VARIABLE}="
        raise UsageError(
            f"{what} {number}: the job has {num_proc} processes, servers included, so no worker is"
            f" left; use -np {number + 1} or more, or fewer servers"
        )


def servers_of(request: Request, environ: Mapping[str, str]) -> int:
    """How many of the processes are servers; 0 where the variable is no number."""
    given = (request.variable(_VARIABLE, environ) or "").strip()
    return int(given) if given.isdecimal() and len(given) <= MOST_DIGITS else 0
