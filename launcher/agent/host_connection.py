"""hvdrun's end of a connection to a host agent: the standard input, output and errors of ssh, srun
or what else reaches the host. Preflight has it first, then the job."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from hvdrun.agent.frames import CHUNK, HELLO, BadFrame, frame, unpack
from hvdrun.machine.processes import die_with_parent

LINE_EVERY_S = 1.0
MOST_READS = 64
LEAVE_S = 2.0  # for commands to end by themselves


class Owner(Protocol):
    """What is called with what the host sends."""

    def on_hello(self) -> None:
        """The host agent runs."""

    def on_data(self) -> None:
        """Something has come, which is a sign of life."""

    def on_frame(self, kind: bytes, rank: int, payload: bytes) -> None:
        """It may raise BadFrame, which ends the connection."""

    def on_errors(self, data: bytes) -> None:
        """ssh's words, or those of the remote shell."""

    def on_end(self) -> None:
        """The connection has ended by itself: the owner closes it."""


class HostConnection:
    def __init__(
        self,
        sock: socket.socket,
        stderr: int,
        owner: Owner,
        selector: selectors.BaseSelector,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.sock = sock
        self.stderr = stderr
        self.process = process  # if hvdrun started it itself
        self.talks = False  # the host agent's first bytes have come
        self.printed = b""  # before them: by the login shell
        self.nonsense = ""  # what the host has sent that is no message
        self.buffer = bytearray()
        self.unsent = bytearray()
        self.line_at = 0.0
        self.paused = False  # nothing is read for now
        self.closed = False
        sock.setblocking(False)
        os.set_blocking(stderr, False)
        self.selector = selector
        self.give_to(owner, selector)

    def give_to(self, owner: Owner, selector: selectors.BaseSelector) -> None:
        """To be called outside of the selector's turn."""
        self._ignore(self.sock)
        self._ignore(self.stderr)
        self.owner, self.selector = owner, selector
        self._watch()
        selector.register(self.stderr, selectors.EVENT_READ, self._errors_ready)

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        self._write(frame(kind, payload=payload))

    def _write(self, data: bytes) -> None:
        if not self.closed:
            self.unsent += data
            self._flush()

    def prompt(self, now: float) -> None:
        """Before the host agent talks: start-up files of the remote shell that read a line would
        wait for ever."""
        if now >= self.line_at:
            self.line_at = now + LINE_EVERY_S
            self._write(b"\n")

    def pause(self, paused: bool) -> None:
        """Stops or resumes reading what the host agent sends."""
        paused = paused and self.talks
        if paused != self.paused and not self.closed:
            self.paused = paused
            self._flush()

    def has_unread(self) -> bool:
        ready = select.poll()
        ready.register(self.sock, select.POLLIN)
        return bool(ready.poll(0))

    def read_all(self) -> None:
        """What is there, up to a limit."""
        for _ in range(MOST_READS):
            if not self.closed and self.has_unread():
                self._read()

    def hang_up(self) -> None:
        """Sends nothing more. A host agent then ends what runs there."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._read_errors()
            self._ignore(self.stderr)
            self._ignore(self.sock)
            self.sock.close()
            os.close(self.stderr)

    def kill(self) -> None:
        """Also the process that hvdrun has started, with those that it has started itself, as ssh
        does for a ProxyJump."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.close()

    def _ignore(self, file: socket.socket | int) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(file)

    def _watch(self) -> None:
        self._ignore(self.sock)
        events = 0 if self.paused else selectors.EVENT_READ
        events |= selectors.EVENT_WRITE if self.unsent else 0
        if events:
            self.selector.register(self.sock, events, self._ready)

    def _flush(self) -> None:
        try:
            while self.unsent:
                del self.unsent[: self.sock.send(self.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self.unsent.clear()  # the reading side notices
        self._watch()

    def _ready(self) -> None:
        if self.unsent and not self.closed:
            self._flush()
        if not self.closed and not self.paused:
            self._read()

    def _read(self) -> None:
        try:
            data = self.sock.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.owner.on_end()
            return
        self.owner.on_data()
        self.buffer += data
        if not self.talks:
            begin = self.buffer.find(HELLO)
            if begin < 0:  # start-up files of the remote shell may print a lot
                self.printed = (self.printed + data)[-CHUNK:]
                del self.buffer[: -len(HELLO)]
                return
            del self.buffer[: begin + len(HELLO)]
            self.talks = True
            self.owner.on_hello()
        try:
            for kind, rank, payload in unpack(self.buffer):
                self.owner.on_frame(kind, rank, payload)
        except BadFrame as what:
            self.nonsense = str(what)
            self.owner.on_end()

    def _errors_ready(self) -> None:
        if not self.closed:  # the socket, ready at the same moment, may have closed the connection
            self._read_errors()

    def _read_errors(self) -> None:
        """Reads once: a pipe holds no more than CHUNK, and its writer may never stop."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.stderr, CHUNK)
            if data:
                self.owner.on_errors(data)
            else:
                self._ignore(self.stderr)


def leave(connections: Collection[HostConnection], patience_s: float = LEAVE_S) -> None:
    """Ends them. Where srun stands in ssh's place, it ends its step only if it ends by itself."""
    for connection in connections:
        connection.hang_up()
    deadline = time.monotonic() + patience_s
    for connection in connections:
        if connection.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                connection.process.wait(max(0.0, deadline - time.monotonic()))
        connection.kill()


def connect(
    argv: Sequence[str],
    environ: Mapping[str, str],
    owner: Owner,
    selector: selectors.BaseSelector,
) -> HostConnection:
    """Starts a command that reaches a host. Raises OSError if it can't be started."""
    near, far = socket.socketpair()
    reader, writer = os.pipe()
    try:
        process = subprocess.Popen(
            argv,
            stdin=far.fileno(),
            stdout=far.fileno(),
            stderr=writer,
            env=environ,
            start_new_session=True,  # Ctrl-C is for hvdrun alone
            preexec_fn=die_with_parent(signal.SIGTERM),  # srun then ends its step,
        )
    except OSError:
        near.close()
        os.close(reader)
        raise
    finally:
        far.close()
        os.close(writer)
    return HostConnection(near, reader, owner, selector, process)
