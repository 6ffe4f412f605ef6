"""Whether hosts can connect to each other over TCP: the part of preflight on each host.

hvdrun sends orders, a line of JSON each: on which addresses to listen, then the job's one-time
secret and which addresses of other hosts to connect to. Both ends of a connection prove that they
know the secret, so that no other program, and no other user's, stands for a host. A connection
carries these proofs and nothing else. A program that does not prove itself gets no answer. With
`--check` it also orders copies between GPUs.
"""

from __future__ import annotations

import contextlib
import errno
import hmac  # here, as strangers may take every descriptor later
import json
import os
import select
import socket
import time
from collections.abc import Callable
from typing import Any

from hvdrun.agent.frames import CHUNK
from hvdrun.agent.gpu_pairs import copies

# Packets are sent again after 1 and 3 s: two may be lost.
CONNECT_S = 4.0
# How long the other end may take to prove itself once it is connected: its host may be busy.
PROOF_S = 10.0
NONCE_BYTES, PROOF_BYTES = 16, 32
# Connections that have not proved themselves. Beyond that many, or where no more files can be
# opened, the oldest is closed.
MOST_CALLERS = 1200
MOST_PORTS = 1000  # tried in a range
ORDER_BYTES = 1 << 20

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
    """Obeys hvdrun's orders until its input ends. `say` sends an answer; `heard` is called whenever
    there was input."""

    def __init__(
        self,
        say: Callable[[dict[str, Any]], None],
        orders: int = 0,
        heard: Callable[[], object] = lambda: None,
    ) -> None:
        self.say = say
        self.heard = heard
        self.orders = orders
        self.buffer = b""
        self.poll = select.poll()
        self.poll.register(orders, select.POLLIN)
        self.secret = b""
        self.listeners: dict[int, socket.socket] = {}
        self.callers: dict[int, tuple[socket.socket, bytes]] = {}
        self.calls: dict[int, _Call] = {}
        self.results: list[str] = []
        self.begin = 0.0

    def run(self) -> None:
        while True:
            for fd, _ in self.poll.poll(100 if self.calls else None):
                if fd == self.orders:
                    if not self._obey():
                        return
                elif fd in self.listeners:
                    self._accept(self.listeners[fd])
                elif fd in self.callers:
                    self._hear_caller(fd)
                elif fd in self.calls:
                    self._go_on(self.calls[fd])
            since_s = time.monotonic() - self.begin
            for call in list(self.calls.values()):
                if since_s > (PROOF_S if call.connected else CONNECT_S):
                    self._end(call, UNPROVEN if call.connected else SILENT)

    def _obey(self) -> bool:
        """False at the end of the orders."""
        data = os.read(self.orders, CHUNK)
        self.heard()
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        # Empty lines are signs of life, and for start-up files that read.
        for line in filter(None, lines):
            order = json.loads(line)
            if "listen" in order:
                self.say({"listening": [self._listen(*words) for words in order["listen"]]})
            elif "copies" in order:
                self.say({"copies": copies(**order["copies"])})
            else:
                self.secret = bytes.fromhex(order["secret"])
                self._connect(order["connect"])
        return bool(data) and len(self.buffer) < ORDER_BYTES

    def _listen(self, address: str, low: int, high: int) -> int | str:
        """The port, or the reason why there is none."""
        try:
            sock = listen(address, low, high)
        except OSError as error:
            return error.strerror or str(error)
        self.listeners[sock.fileno()] = sock
        # Nobody can prove anything before the secret is known here: callers wait in the queue.
        return int(sock.getsockname()[1])

    def _connect(self, addresses: list[tuple[str, int]]) -> None:
        for fd in self.listeners:
            self.poll.register(fd, select.POLLIN)
        self.begin = time.monotonic()
        self.results = [""] * len(addresses)
        for number, (address, port) in enumerate(addresses):
            call = _Call(number, address, port)
            self.calls[call.sock.fileno()] = call
            self.poll.register(call.sock.fileno(), select.POLLOUT)
            code = call.sock.connect_ex((address, port))
            if code not in (0, errno.EINPROGRESS):
                self._end(call, _BY_ERROR.get(code, NO_ROUTE))
        if not addresses:
            self.say({"results": []})

    def _go_on(self, call: _Call) -> None:
        if not call.connected:
            code = call.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self._end(call, _BY_ERROR.get(code, NO_ROUTE))
                return
            call.connected = True
            self.poll.modify(call.sock.fileno(), select.POLLIN)
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
        self.poll.unregister(call.sock.fileno())
        del self.calls[call.sock.fileno()]
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
        self.callers[sock.fileno()] = sock, b""
        self.poll.register(sock.fileno(), select.POLLIN)

    def _hear_caller(self, fd: int) -> None:
        sock, heard = self.callers[fd]
        try:
            data = sock.recv(NONCE_BYTES + PROOF_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        heard += data
        if data and len(heard) < NONCE_BYTES + PROOF_BYTES:
            self.callers[fd] = sock, heard
            return
        nonce, theirs = heard[:NONCE_BYTES], heard[NONCE_BYTES:]
        address, port = sock.getsockname()[:2]
        if hmac.compare_digest(theirs, proof(self.secret, b"caller", nonce, address, port)):
            with contextlib.suppress(OSError):
                sock.send(proof(self.secret, b"listener", nonce, address, port))
        self._dismiss(fd)

    def _dismiss(self, fd: int) -> None:
        self.poll.unregister(fd)
        self.callers.pop(fd)[0].close()
