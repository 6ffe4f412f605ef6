"""A loop for sockets of one process, both ends of which are served by one selector."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable

from hvdrun.rendezvous.sealed import SealedSocket

LIMIT_S = 10.0


class Loop:
    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()

    def until(self, condition: Callable[[], object], each_turn: Callable[[], None] = lambda: None):
        """Serves the sockets until the condition holds; fails after some seconds."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, "nothing happens any more"
            for key, _ in self.selector.select(0.02):
                key.data()
            each_turn()

    def close(self) -> None:
        for key in list(self.selector.get_map().values()):
            self.selector.unregister(key.fileobj)
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self.selector.close()


class End:
    """A SealedSocket, and what it has heard."""

    def __init__(self, loop: Loop, sock: socket.socket, key: bytes, is_caller: bool) -> None:
        self.heard: list[tuple[bytes, bytes]] = []
        self.ended: str | None = None
        self.connection = SealedSocket(
            sock, key, loop.selector, self._message, self._end, is_caller
        )

    def _message(self, _: SealedSocket, kind: bytes, payload: bytes) -> None:
        self.heard.append((kind, payload))

    def _end(self, _: SealedSocket, why: str) -> None:
        self.ended = why


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        caller = socket.create_connection(server.getsockname())
        return caller, server.accept()[0]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
