"""The ranks of all hosts, as hvdrun reaches them: keepers here, a HostLink to each other host."""

from __future__ import annotations

import os
import selectors
import signal
import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from hvdrun.agent.frames import LOOK, RELEASE, SIGNAL, WITH_STACK, WITH_STACK_AND_BOX
from hvdrun.agent.local_ranks import LocalRanks
from hvdrun.agent.peers import listen
from hvdrun.job.course import Event
from hvdrun.job.events import HostConnected
from hvdrun.machine.environment import for_connections, pack, pack_host_variables
from hvdrun.plan.command import Command
from hvdrun.running.sources import Stdin

if TYPE_CHECKING:  # they are loaded for the first other host
    from hvdrun.agent.host_connection import HostConnection
    from hvdrun.running.host_link import HostLink


class Deliver(Protocol):
    def __call__(self, kind: bytes, rank: int, payload: bytes, host: str = "") -> None:
        """Gets what a keeper has sent, and from which other host."""


class Hosts:
    """`secret`: the job's name, by which keepers find hvdrun. `kept`: preflight's connections, by
    host. `tell` gets events."""

    def __init__(
        self,
        command: Command,
        secret: str,
        host_timeout_s: float,
        selector: selectors.BaseSelector,
        stdin: Stdin,
        kept: dict[str, HostConnection],
        deliver: Deliver,
        tell: Callable[[Event], None],
    ) -> None:
        self.command = command
        self.secret = secret
        self.host_timeout_s = host_timeout_s
        self.selector = selector
        self.stdin = stdin
        self.kept = kept
        self.deliver = deliver
        self.tell = tell
        self.variables = None if command.sent is None else pack(command.sent)
        self.links: set[HostLink] = set()
        listener = listen(secret)
        assert listener is not None, "nobody else knows the secret"
        self.local_ranks = LocalRanks(
            listener,
            selector,
            deliver,
            stdin.for_local_rank,
            b"" if self.variables is None else pack_host_variables(command.environment),
            on_host=None if command.sent is None else self.connect,
            num_ranks=command.num_proc,
            variables=self.variables,
            secret=secret,
        )

    def connect(self, asker: socket.socket, wish: list[bytes]) -> None:
        """The role ssh wants MPI's daemon on a host."""
        from hvdrun.running.host_link import HostLink  # for the first other host

        kept = self.kept.pop(os.fsdecode(wish[0]), None)
        if kept is not None and wish[1]:  # with options of the user's for ssh: another one
            kept.kill()
        elif kept is not None:
            kept.read_all()  # whether it has ended
        link = HostLink(
            asker,
            wish,
            None if kept is None or kept.closed else kept,
            for_connections(self.command.environment),
            self.secret,
            self.selector,
            partial(self.deliver, host=wish[0].decode(errors="replace")),
            self.tell,
            self.stdin.wanted_by,
            self._closed,
            self.host_timeout_s,
            self.command.num_proc,
            self.variables,
        )
        self.links.add(link)
        self.tell(HostConnected(link.host))
        link.begin()

    def _closed(self, link: HostLink) -> None:
        self.links.discard(link)
        self.tell(link.how_it_ended())

    def exchange_signs_of_life(self, now: float) -> None:
        for link in [link for link in self.links if not link.tick(now)]:
            self.links.discard(link)
            link.close()
            self.tell(link.how_it_fell_silent())

    def pause(self, paused: bool) -> None:
        """Stops or resumes reading what ranks write."""
        self.local_ranks.pause(paused)
        for link in self.links:
            link.pause(paused)

    def end(self, grace_s: float, first: int = signal.SIGTERM) -> None:
        """Every rank on every host gets the signals of `agent.signals.steps`."""
        self.local_ranks.end(grace_s, first)
        self.end_others(grace_s, first)

    def end_others(self, grace_s: float, first: int = signal.SIGTERM) -> None:
        for link in self.links:
            link.end(grace_s, first)

    def release(self) -> None:
        self.local_ranks.release()
        self._send_others(RELEASE)

    def pass_on(self, number: int, request: int) -> None:
        payload = b"%d %d" % (number, request)
        self.local_ranks.pass_on(payload)
        self._send_others(SIGNAL, payload)

    def look(self, ranks: tuple[int, ...], with_stack: bool, with_box: bool) -> None:
        """Every supervisor is asked, as two names of hosts may mean one machine: the one that has
        the rank answers."""
        what = WITH_STACK_AND_BOX if with_box else WITH_STACK if with_stack else b""
        for rank in ranks:
            self.local_ranks.look(rank, what)
            self._send_others(LOOK, b"%d %s" % (rank, what))

    def _send_others(self, kind: bytes, payload: bytes = b"") -> None:
        for link in self.links:
            if link.talking:
                link.send(kind, payload)

    def hang_up(self, host: str) -> None:
        for link in self.links:
            if link.host == host:
                link.hang_up()

    def close(self) -> None:
        for link in list(self.links):
            link.close()
        if self.kept:  # which mpirun has not wanted
            from hvdrun.agent.host_connection import leave

            leave(self.kept.values())
            self.kept.clear()
        self.local_ranks.kill()
        self.local_ranks.listener.close()
