"""Processes of this host that want a program on another node: the role `reach` of the agent. They
hand over their standard descriptors, and wait for the program's exit code."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping

from hvdrun.agent import frames
from hvdrun.agent.frames import BadFrame, frame, receive, send, unpack
from hvdrun.machine.socket_users import is_trusted

_REST_S = 0.2  # without new ones, if this process has no descriptors left


class Caller:
    """One such process, once it has said what it wants."""

    def __init__(
        self,
        sock: socket.socket,
        host: str,
        argv: tuple[str, ...],
        fds: list[int],
        forget: Callable[[], None],
    ) -> None:
        self.sock = sock
        self.forget = forget  # stops listening to the process
        self.host = host
        self.argv = argv
        self.fds = fds
        self.closed = False

    def descriptors(self) -> tuple[Mapping[bytes, int], Mapping[bytes, int]]:
        """For Relay, which closes them: what is read here, and what is written."""
        stdin, stdout, stderr = self.fds
        self.fds = []
        return {frames.STDIN: stdin}, {frames.OUT: stdout, frames.ERR: stderr}

    def end(self, exit_code: int) -> None:
        with contextlib.suppress(OSError):
            send(self.sock, frame(frames.BYE, payload=b"%d" % exit_code))
        self.close()

    def fail(self, why: str) -> None:
        """The process prints the reason itself, as the descriptors may belong to the relay."""
        with contextlib.suppress(OSError):
            send(
                self.sock,
                frame(
                    frames.BYE, payload=b"%d %s" % (frames.SSH_FAILED, why.encode(errors="replace"))
                ),
            )
        self.close()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.forget()
            for fd in self.fds:
                os.close(fd)
            self.fds = []
            self.sock.close()


class Callers:
    """`on_wanted(caller)` is called once a process has said what it wants, `on_left(caller)` if it
    ends before its program."""

    def __init__(
        self,
        listener: int,
        selector: selectors.BaseSelector,
        on_wanted: Callable[[Caller], None],
        on_left: Callable[[Caller], None],
        secret: str,
    ) -> None:
        self.secret = secret
        self.listener = socket.socket(fileno=listener)
        self.listener.setblocking(False)
        self.selector = selector
        self.on_wanted = on_wanted
        self.on_left = on_left
        self.callers: dict[socket.socket, Caller | None] = {}
        self.buffers: dict[socket.socket, tuple[bytearray, list[int]]] = {}
        self.rests_until: float | None = None
        self._listen()

    def tick(self) -> None:
        if self.rests_until is not None and time.monotonic() > self.rests_until:
            self.rests_until = None
            self._listen()

    def _listen(self) -> None:
        self.selector.register(self.listener, selectors.EVENT_READ, self._accept)

    def _rest(self) -> None:
        self.rests_until = time.monotonic() + _REST_S
        self.selector.unregister(self.listener)

    def _accept(self) -> None:
        try:
            sock, _ = self.listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left: the process waits in the queue
            self._rest()
            return
        if not is_trusted(sock):
            sock.close()
        else:
            sock.setblocking(False)
            self.callers[sock] = None
            self.buffers[sock] = bytearray(), []
            self.selector.register(sock, selectors.EVENT_READ, lambda: self._hear(sock))

    def _hear(self, sock: socket.socket) -> None:
        if sock not in self.callers:  # it has been closed in this turn of the loop
            return
        caller = self.callers[sock]
        try:
            data, fds = receive(sock)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        buffer, given = self.buffers[sock]
        buffer += data
        given += fds
        try:
            heard = list(unpack(buffer))
        except BadFrame:
            data = b""
        if not data:
            if caller is not None:
                self.on_left(caller)
                return
            self._forget(sock)
            for fd in given:
                os.close(fd)
            sock.close()
            return
        for kind, _, payload in heard:
            if caller is None and kind == frames.HOST and len(given) == 3:
                key, _, wish = payload.partition(b"\0")
                host, *argv = wish.decode(errors="surrogateescape").split("\0")
                caller = Caller(sock, host, tuple(argv), given[:], lambda: self._forget(sock))
                given.clear()
                if not frames.has_key(key, self.secret):
                    caller.fail("this process does not know the job's key")
                    continue
                self.callers[sock] = caller
                self.on_wanted(caller)
            elif caller is None:  # the kernel gives fewer descriptors if this process has too many
                caller = Caller(sock, "", (), given[:], lambda: self._forget(sock))
                given.clear()
                caller.fail("hvdrun has no descriptors left for the program (see `ulimit -n`)")

    def _forget(self, sock: socket.socket) -> None:
        del self.callers[sock], self.buffers[sock]
        self.selector.unregister(sock)

    def close(self) -> None:
        for sock, caller in list(self.callers.items()):
            if caller is not None:
                caller.close()
            else:
                self._forget(sock)
                sock.close()
        if self.rests_until is None:
            self.selector.unregister(self.listener)
        self.listener.close()
