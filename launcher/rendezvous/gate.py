"""Where node 0 listens. Lets in only who has proved the secret; strangers, however many and however
slow they are, cost a bounded number of sockets and little memory, and keep nobody out for long."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from hvdrun.agent import peers
from hvdrun.machine.socket_users import is_trusted
from hvdrun.rendezvous.sealed import SealedSocket
from hvdrun.rendezvous.secret import is_loopback, name_here

# Connections that have not proved the secret yet: how many, and for how long each.
MOST_PENDING = 128
PENDING_S = 10.0
_AT_ONCE = 32  # accepted per turn, so that nodes are served between them
_REST_S = 0.2  # without new connections, if this process has no descriptors left


@dataclass
class _Caller:
    address: str  # "": this user's or root's process on this machine
    since: float


class Gate:
    """`on_admitted(connection, kind, payload)` gets a caller's first message and with it the
    connection, whose handlers it sets; `on_stranger(address)` hears of those that have tried and
    failed. Callers of other users are turned away from a listener within the machine.
    """

    def __init__(
        self,
        listeners: list[socket.socket],
        key: bytes,
        selector: selectors.BaseSelector,
        on_admitted: Callable[[SealedSocket, bytes, bytes], None],
        on_stranger: Callable[[str], None],
    ) -> None:
        self.listeners = listeners
        self.key = key
        self.selector = selector
        self.on_admitted = on_admitted
        self.on_stranger = on_stranger
        self.pending: dict[SealedSocket, _Caller] = {}
        self.rests_until: float | None = None
        for listener in listeners:
            listener.setblocking(False)
        self._listen()

    def tick(self) -> None:
        """Hangs up on those that take too long."""
        now = time.monotonic()
        for connection, caller in list(self.pending.items()):
            if now - caller.since > PENDING_S:
                self._drop(connection)
        if self.rests_until is not None and now > self.rests_until:
            self.rests_until = None
            self._listen()

    def close(self) -> None:
        for connection in list(self.pending):
            self._drop(connection)
        for listener in self.listeners:
            with contextlib.suppress(KeyError):
                self.selector.unregister(listener)
            listener.close()

    def _listen(self) -> None:
        for listener in self.listeners:
            self.selector.register(
                listener, selectors.EVENT_READ, lambda listener=listener: self._accept(listener)
            )

    def _accept(self, listener: socket.socket) -> None:
        if self.rests_until is not None:  # since this turn of the loop
            return
        for _ in range(_AT_ONCE):
            try:
                sock, address = listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError:  # no descriptor is left
                self._rest()
                return
            try:
                self._begin(sock, address[0] if sock.family != socket.AF_UNIX else "")
            except OSError:  # it has gone already
                sock.close()

    def _begin(self, sock: socket.socket, address: str) -> None:
        if sock.family == socket.AF_UNIX and not is_trusted(sock):
            sock.close()
            return
        connection = SealedSocket(
            sock, self.key, self.selector, self._first_message, self._ended, is_caller=False
        )
        self.pending[connection] = _Caller(address, time.monotonic())
        if len(self.pending) > MOST_PENDING:
            self._drop(self._most_likely_stranger())

    def _most_likely_stranger(self) -> SealedSocket:
        """The oldest one of the address that has the most."""
        counts = Counter(caller.address for caller in self.pending.values())
        crowd = max(counts.values())
        return next(c for c, caller in self.pending.items() if counts[caller.address] == crowd)

    def _rest(self) -> None:
        if self.pending:
            self._drop(self._most_likely_stranger())
        self.rests_until = time.monotonic() + _REST_S
        for listener in self.listeners:
            self.selector.unregister(listener)

    def _first_message(self, connection: SealedSocket, kind: bytes, payload: bytes) -> None:
        del self.pending[connection]
        self.on_admitted(connection, kind, payload)

    def _ended(self, connection: SealedSocket, why: str) -> None:
        caller = self.pending.pop(connection, None)
        if caller is not None and caller.address and why and not connection.is_proved:
            self.on_stranger(caller.address)

    def _drop(self, connection: SealedSocket) -> None:
        del self.pending[connection]
        connection.close()


def listen_here(port: int) -> list[socket.socket]:
    """For nodes of this user on this machine, without TCP. Raises OSError, and peers.Stranger if
    another user's process has the name."""
    fd = peers.listen(name_here(port))
    if fd is None:
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    return [socket.socket(fileno=fd)]


def listen(host: str, port: int) -> list[socket.socket]:
    """On all addresses of this host, as `host` may be the address of a service in front of it; for
    a loopback address, on that alone. Raises OSError."""
    if is_loopback(host):
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        where: list[tuple[int, tuple[object, ...]]] = list(
            dict.fromkeys((family, address) for family, _, _, _, address in found)
        )
    else:
        where = [(socket.AF_INET6, ("::", port)), (socket.AF_INET, ("0.0.0.0", port))]
    listeners: list[socket.socket] = []
    error: OSError | None = None
    for family, address in where:
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as problem:  # no IPv6 in this kernel
            error = problem
            continue
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(address)
            sock.listen(1024)
            listeners.append(sock)
        except OSError as problem:
            sock.close()
            error = problem
            if problem.errno == errno.EADDRINUSE:  # callers might reach that program
                break
    if error is not None and (not listeners or error.errno == errno.EADDRINUSE):
        for sock in listeners:
            sock.close()
        raise error
    return listeners
