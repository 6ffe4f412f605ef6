"""The channel of workers on several hosts that train without servers: a team of its own.

It has the ranks of the world. The first worker of each host serves there: a thread of it applies
the gradients of other hosts (`home_server`). The first AsyncOptimizer that needs the channel makes
it; it ends with the world.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
from typing import Protocol, cast

import torch

from hvdlite.asynchronous.home_server import HomeServer
from hvdlite.asynchronous.messages import REQUEST_TAG, Header, Kind
from hvdlite.errors import HorovodInternalError
from hvdlite.world import world
from hvdlite.world.process import exits
from hvdlite.world.teams.roles import Everyone, Roles
from hvdlite.world.teams.team import make_team

_LABEL = "between hosts"
# For a server that does not answer; the job is about to fail then.
_BYE_LIMIT_S = 20.0
# For a server that may have left already: in shutdown it leaves after the last optimizer.
_UNUSED_LIMIT_S = 1.0
# For the text of a failure to come.
_TEXT_LIMIT_S = 10.0
# No worker sends a message with it.
_NO_TAG = (1 << 31) - 4


class Leaving(Protocol):
    """An optimizer of this worker, which uses the channel."""

    def leave(self) -> None:
        """This worker does not count any more on its host."""


@dataclasses.dataclass(frozen=True)
class Workers(Everyone):
    """All are workers; the first of each host serves besides."""

    def name_of(self, rank: int) -> str:
        host = self.placement.host_names[self.host_of(rank)]
        serves = " and serves there" if rank in self.roles.servers else ""
        return f"worker {rank} (on {host}{serves})"


class Channel:
    """The channel, as one worker sees it.

    server: where this worker is the first of its host.
    optimizers: those of this worker that use the channel.
    has_left: it has said goodbye, its last message to each server.
    """

    def __init__(self, active: world.World) -> None:
        """Collective over the workers; blocks.

        Raises:
            LaunchError: A rank lacks memory, or MPI communicators; on every rank.
        """
        peers, placement = active.team.peers, active.placement
        assert peers is not None
        assert active.table is not None
        ranks = tuple(range(active.size))
        # A server waits for the others for as long as they compute, so nothing there is late.
        quiet = dataclasses.replace(active.config, stall_check_disable=True)
        part = peers.part(ranks, _LABEL)
        try:
            self.team = make_team(quiet, active.table, part, placement, ranks, _LABEL)
        except BaseException:
            part.retire(_LABEL)
            raise
        leaders = tuple(host[0] for host in placement.hosts)
        self.workers = Workers(self.team, placement, Roles(ranks, leaders))
        self.optimizers: list[Leaving] = []
        self.server = HomeServer(self.workers) if active.rank in leaders else None
        self._teams = active.teams
        self._pid = os.getpid()
        self.has_left = False
        active.between_hosts = self
        active.on_teams_changed()
        active.before_leaving.append(self._leave)
        # Where hvdlite has started MPI, the C core closes the engines at exit, and tells nobody
        # first.
        atexit.register(self._leave, at_exit=True)

    def _leave(self, at_exit: bool = False) -> None:
        """Says goodbye, and goes on serving this host's parts until no other host needs them."""
        if self.has_left or os.getpid() != self._pid:
            return
        self.has_left = True
        limit_s = _BYE_LIMIT_S if at_exit or self.optimizers else _UNUSED_LIMIT_S
        for optimizer in list(self.optimizers):
            optimizer.leave()
        sent = []
        # What can't be told any more is known: the engine is broken.
        with contextlib.suppress(RuntimeError, TimeoutError):
            header = Header(Kind.BYE, self.team.rank).tensor()
            for server in self.workers.roles.servers:
                if server != self.team.rank and not self._is_own_host(server):
                    sent.append(self.team.engine.send(header, server, REQUEST_TAG))
            for operation in sent:
                operation.wait(limit_s)
        # A failed process must end: that is how the others learn of it.
        if self.server is not None and exits.is_failing():
            self.server.stop()
        elif self.server is not None:
            # No rank is to wait for this one in a collective while it serves.
            for team in self._teams():
                team.close(at_exit)
            # At the end of the process the receivers must have ended, which the goodbyes do; in
            # shutdown the end of the team does it.
            self.server.finish(at_exit)

    def _is_own_host(self, rank: int) -> bool:
        return self.workers.host_of(rank) == self.workers.host_of(self.team.rank)

    def fail(self) -> None:
        """The server of this host has failed, or another one that it hears of.

        Raises:
            HorovodInternalError: Always, with the text of the failure.
        """
        receive = self.team.engine.recv(torch.empty(1, dtype=torch.uint8), -1, _NO_TAG)
        try:
            failure = receive.wait(_TEXT_LIMIT_S)
        except TimeoutError:
            failure = "the server of this host has failed"
        raise HorovodInternalError(f"AsyncOptimizer: {failure}")


def channel_of(active: world.World) -> Channel:
    """The world's channel. Collective over the workers where it does not exist yet."""
    if active.between_hosts is None:
        return Channel(active)
    return cast("Channel", active.between_hosts)
