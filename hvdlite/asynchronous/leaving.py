"""A worker leaves: it tells the servers, which end when all workers have told them."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os

from hvdlite.asynchronous.messages import REQUEST_TAG, Header, Kind
from hvdlite.world import world

# For a server that does not answer; the job is about to fail then.
_LIMIT_S = 20.0


def tell_servers_at_the_end(active: world.World) -> None:
    """A worker's world has just begun."""
    once = functools.cache(functools.partial(_say_goodbye, active, os.getpid()))
    active.before_leaving.append(once)
    # Where hvdlite has started MPI, the C core closes the engines at exit, and tells nobody first.
    atexit.register(once)


def _say_goodbye(active: world.World, pid: int) -> None:
    everyone = active.everyone
    assert everyone is not None
    if os.getpid() != pid:
        return
    worker = everyone.roles.workers.index(everyone.team.rank)
    sent = []
    # What can't be told any more is known: the engine is broken.
    with contextlib.suppress(RuntimeError, TimeoutError):
        for server in everyone.roles.servers:
            header = Header(Kind.BYE, worker).tensor()
            sent.append(everyone.team.engine.send(header, server, REQUEST_TAG))
        for operation in sent:
            operation.wait(_LIMIT_S)
