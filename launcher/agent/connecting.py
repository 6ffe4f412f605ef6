"""Whether hosts can connect to each other over TCP: the part of preflight on each host.

hvdrun sends orders, as JSON: on which addresses to listen, then the job's one-time
secret and which addresses of other hosts to connect to. Both ends of a connection prove that they
know the secret, so that no other program, and no other user's, stands for a host. A connection
carries these proofs and nothing else. A program that does not prove itself gets no answer. With
`--check` it also orders copies between GPUs.
"""

from __future__ import annotations

import contextlib
import errno
import hmac  # here, as strangers may take every descriptor later
import os
import selectors
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from hvdrun.agent.gpu_copies import copies

# Packets are sent again after 1 and 3 s: two may be lost.
CONNECT_S = 4.0
# How long the other end may take to prove itself once it is connected: its host may be busy.
PROOF_S = 10.0
NONCE_BYTES, PROOF_BYTES = 16, 32
# Connections that have not proved themselves. Beyond that many, or where no more files can be
# opened, the oldest is closed.
MOST_CALLERS = 1200
MOST_PORTS = 1000  # tried in a range

# The results of a connection, for hvdrun.
CONNECTED, REFUSED, NO_ROUTE, SILENT, STRANGER, UNPROVEN = (
    *("connected", "refused", "no route", "silent", "stranger", "unproven"),
)
RESULTS = (CONNECTED, REFUSED, NO_ROUTE, SILENT, STRANGER, UNPROVEN)
_BY_ERROR = {
    0: CONNECTED,
    errno.ECONNREFUSED: REFUSED,
    errno.ETIMEDOUT: SILENT,
}


def proof(secret: bytes, end: bytes, nonce: bytes, address: str, port: int) -> bytes:
    """Shows that `end` (`caller` or `listener`) of this connection knows the secret."""
    return hmac.digest(secret, b"%s\0%s\0%s %d" % (end, nonce, address.encode(), port), "sha256")


def _family(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def listen(address: str, low: int, high: int) -> socket.socket:
    """A socket on the first free port of the range; 0: any port. Raises OSError."""
    sock = socket.socket(_family(address), socket.SOCK_STREAM)
    for port in range(low, min(high, low + MOST_PORTS) + 1):
        try:
            sock.bind((address, port))
            sock.listen(1024)
        except OSError as error:
            # Two sockets may bind a port, and only one may listen there.
            if error.errno != errno.EADDRINUSE or port == min(high, low + MOST_PORTS):
                raise
            sock.close()
            sock = socket.socket(_family(address), socket.SOCK_STREAM)
        else:
            break
    sock.setblocking(False)
    return sock


class _Call:
    """A connection to another host."""

    def __init__(self, number: int, address: str, port: int) -> None:
        self.number, self.address, self.port = number, address, port
        self.nonce = os.urandom(NONCE_BYTES)
        self.sock = socket.socket(_family(address), socket.SOCK_STREAM)
        self.sock.setblocking(False)
        self.connected = False
        self.heard = b""


class Connecting:
    """Obeys hvdrun's orders. `say` sends an answer."""

    def __init__(
        self, selector: selectors.BaseSelector, say: Callable[[dict[str, Any]], None]
    ) -> None:
        self.selector = selector
        self.say = say
        self.secret = b""
        self.listeners: list[socket.socket] = []
        self.callers: dict[socket.socket, bytes] = {}  # and what each has sent
        self.calls: set[_Call] = set()
        self.results: list[str] = []
        self.begin = 0.0

    def obey(self, order: dict[str, Any]) -> None:
        if "listen" in order:
            self.say({"listening": [self._listen(*words) for words in order["listen"]]})
        elif "copies" in order:
            self.say({"copies": copies(**order["copies"])})
        else:
            self.secret = bytes.fromhex(order["secret"])
            self._connect(order["connect"])

    def tick(self) -> None:
        """Gives up what takes too long."""
        since_s = time.monotonic() - self.begin
        for call in list(self.calls):
            if since_s > (PROOF_S if call.connected else CONNECT_S):
                self._end(call, UNPROVEN if call.connected else SILENT)

    def close(self) -> None:
        for sock in (*self.listeners, *self.callers, *(call.sock for call in self.calls)):
            with contextlib.suppress(KeyError):
                self.selector.unregister(sock)
            sock.close()
        self.callers.clear()
        self.calls.clear()

    def _listen(self, address: str, low: int, high: int) -> int | str:
        """The port, or the reason why there is none."""
        try:
            sock = listen(address, low, high)
        except OSError as error:
            return error.strerror or str(error)
        self.listeners.append(sock)
        # Nobody can prove anything before the secret is known here: callers wait in the queue.
        return int(sock.getsockname()[1])

    def _connect(self, addresses: list[tuple[str, int]]) -> None:
        for listener in self.listeners:
            self.selector.register(listener, selectors.EVENT_READ, partial(self._accept, listener))
        self.begin = time.monotonic()
        self.results = [""] * len(addresses)
        for number, (address, port) in enumerate(addresses):
            call = _Call(number, address, port)
            self.calls.add(call)
            self.selector.register(call.sock, selectors.EVENT_WRITE, partial(self._go_on, call))
            code = call.sock.connect_ex((address, port))
            if code not in (0, errno.EINPROGRESS):
                self._end(call, _BY_ERROR.get(code, NO_ROUTE))
        if not addresses:
            self.say({"results": []})

    def _go_on(self, call: _Call) -> None:
        if call not in self.calls:  # closed in this turn of the loop
            return
        if not call.connected:
            code = call.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self._end(call, _BY_ERROR.get(code, NO_ROUTE))
                return
            call.connected = True
            self.selector.modify(call.sock, selectors.EVENT_READ, partial(self._go_on, call))
            mine = proof(self.secret, b"caller", call.nonce, call.address, call.port)
            with contextlib.suppress(OSError):
                call.sock.send(call.nonce + mine)
            return
        with contextlib.suppress(BlockingIOError):
            try:
                data = call.sock.recv(PROOF_BYTES)
            except ConnectionError:
                data = b""
            call.heard += data
            if not data or len(call.heard) >= PROOF_BYTES:
                theirs = proof(self.secret, b"listener", call.nonce, call.address, call.port)
                self._end(call, CONNECTED if hmac.compare_digest(call.heard, theirs) else STRANGER)

    def _end(self, call: _Call, result: str) -> None:
        self.selector.unregister(call.sock)
        self.calls.remove(call)
        call.sock.close()
        self.results[call.number] = result
        if all(self.results):
            self.say({"results": self.results})

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and self.callers:
                self._dismiss(next(iter(self.callers)))
            return
        sock.setblocking(False)
        if len(self.callers) >= MOST_CALLERS:
            self._dismiss(next(iter(self.callers)))
        self.callers[sock] = b""
        self.selector.register(sock, selectors.EVENT_READ, partial(self._hear_caller, sock))

    def _hear_caller(self, sock: socket.socket) -> None:
        if sock not in self.callers:  # dismissed in this turn of the loop
            return
        try:
            data = sock.recv(NONCE_BYTES + PROOF_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        heard = self.callers[sock] + data
        if data and len(heard) < NONCE_BYTES + PROOF_BYTES:
            self.callers[sock] = heard
            return
        nonce, theirs = heard[:NONCE_BYTES], heard[NONCE_BYTES:]
        address, port = sock.getsockname()[:2]
        if hmac.compare_digest(theirs, proof(self.secret, b"caller", nonce, address, port)):
            with contextlib.suppress(OSError):
                sock.send(proof(self.secret, b"listener", nonce, address, port))
        self._dismiss(sock)

    def _dismiss(self, caller: socket.socket) -> None:
        self.selector.unregister(caller)
        del self.callers[caller]
        caller.close()
