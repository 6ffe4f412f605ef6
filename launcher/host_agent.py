"""The roles `host` and `ssh`: a remote host's end of the connection, and how it is made."""

from __future__ import annotations

import contextlib
import os
import pwd
import selectors
import shlex
import signal
import sys
import time
from typing import NoReturn

from .link import (
    CHUNK,
    DAEMON,
    END,
    GRACE_S,
    HOST,
    MAGIC,
    PING,
    SILENCE_LIMIT_S,
    STDIN,
    Waker,
    connect,
    frame,
    send,
    unpack,
    write_all,
)
from .processes import kill_descendants, set_subreaper
from .station import Station


def ssh_main(arguments: list[str]) -> NoReturn:
    """`ssh [OPTION…] -- HOST COMMAND…`: becomes ssh, whose ends are hvdrun's and whose remote
    command is the host agent. Our options come from hvdrun, those after `--` from MPI."""
    border = arguments.index("--")
    options, rest = arguments[:border], arguments[border + 1 :]
    while rest[0].startswith("-"):  # MPI's own: -x and the like
        options.append(rest.pop(0))
    host, command = rest[0], " ".join(rest[1:])
    name = os.environ.get("HVDRUN_LINK", "")
    sock = connect(name)
    if sock is not None:
        reader, writer = os.pipe()
        send(sock, frame(HOST, payload=host.encode()), [reader])
        os.dup2(sock.fileno(), 0)
        os.dup2(sock.fileno(), 1)
        os.dup2(writer, 2)
        agent = [sys.executable, "-I", "-S", sys.argv[0], "host", name, command]
        command = shlex.join(agent)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvp("ssh", ["ssh", *options, host, command])
    except OSError as error:
        write_all(2, f"ssh: {error.strerror} (Debian: apt-get install openssh-client)\n".encode())
    os._exit(127)


def host_main(arguments: list[str]) -> NoReturn:
    name, command = arguments
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    write_all(1, MAGIC)
    status = HostAgent(name, command).run()
    # MPI waits for ssh, which waits for whoever holds its ends.
    os._exit(status)


class HostAgent:
    """Runs MPI's daemon and looks after the ranks of this host; ends both when hvdrun says so,
    closes the connection or falls silent."""

    def __init__(self, name: str, command: str) -> None:
        self.command = command
        self.selector = selectors.DefaultSelector()
        self.buffer = bytearray()
        self.heard = time.monotonic()
        self.end_at: float | None = None  # when everything is killed
        self.stdin_reader, self.stdin = os.pipe()
        self.station: Station | None = None
        # Where two names mean one host, the ranks find the first agent, or hvdrun itself.
        with contextlib.suppress(OSError):
            self.station = Station(name, self.selector, self._send, lambda: self.stdin_reader)

    def _send(self, kind: bytes, rank: int, payload: bytes) -> None:
        write_all(1, frame(kind, rank, payload))

    def run(self) -> int:
        set_subreaper()
        waker = Waker([signal.SIGCHLD])
        daemon = self._start_daemon()
        status: int | None = None
        self.selector.register(0, selectors.EVENT_READ, self._hear)
        self.selector.register(waker.fd, selectors.EVENT_READ, waker.read)
        left = True
        try:
            while left or (self.station and self.station.keepers):
                for key, _ in self.selector.select(1.0):
                    key.data()
                now = time.monotonic()
                if now - self.heard > SILENCE_LIMIT_S:
                    self._end(GRACE_S)
                if self.end_at is not None and now > self.end_at:
                    break
                # A daemon that has put itself in the background is our child again.
                while left:
                    try:
                        pid, raw = os.waitpid(-1, os.WNOHANG)
                    except ChildProcessError:
                        left = False
                        break
                    if not pid:
                        break
                    if pid == daemon:
                        code = os.waitstatus_to_exitcode(raw)
                        status = code if code >= 0 else 128 - code
        except BrokenPipeError:  # hvdrun is gone
            if self.station:
                self.station.end(GRACE_S)
            time.sleep(0)
        kill_descendants()
        return 1 if status is None else status

    def _start_daemon(self) -> int:
        reader, writer = os.pipe()
        shell = pwd.getpwuid(os.getuid()).pw_shell or "/bin/sh"
        pid = os.fork()
        if pid == 0:
            try:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(writer, 1)
                os.dup2(writer, 2)
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)
                # As sshd would: MPI wrote the command for the user's shell.
                os.execvp(shell, [shell, "-c", self.command])
            finally:
                os._exit(127)
        os.close(writer)

        def read() -> None:
            data = os.read(reader, CHUNK)
            if data:
                self._send(DAEMON, -1, data)
            else:
                self.selector.unregister(reader)

        self.selector.register(reader, selectors.EVENT_READ, read)
        return pid

    def _hear(self) -> None:
        data = os.read(0, CHUNK)
        if not data:
            self.selector.unregister(0)
            self._end(GRACE_S)
            return
        self.heard = time.monotonic()
        self.buffer += data
        for kind, _, payload in unpack(self.buffer):
            if kind == PING:
                self._send(PING, -1, b"")
            elif kind == END:
                self._end(int(payload) / 10)
            elif kind == STDIN:
                self._feed(payload)

    def _feed(self, data: bytes) -> None:
        if not data:
            os.close(self.stdin)
            return
        # hvdrun sends no more before the answer, so that this is all that ever waits here.
        pending = bytearray(data)
        os.set_blocking(self.stdin, False)

        def write() -> None:
            try:
                del pending[: os.write(self.stdin, pending)]
            except BlockingIOError:
                return
            except BrokenPipeError:
                pending.clear()
            if not pending:
                self.selector.unregister(self.stdin)
                self._send(STDIN, -1, b"")

        self.selector.register(self.stdin, selectors.EVENT_WRITE, write)

    def _end(self, grace_s: float) -> None:
        self.heard = float("inf")
        at = time.monotonic() + grace_s + 1
        self.end_at = at if self.end_at is None else min(at, self.end_at)
        if self.station:
            self.station.end(grace_s)
