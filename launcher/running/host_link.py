"""hvdrun's end of the connection to another host: ssh's standard input, output and errors.

It turns incoming messages into events for `course`, and does not know what they mean for the job.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import socket
import time
from collections.abc import Callable

from hvdrun.agent.frames import (
    BYE,
    CHUNK,
    CLOSED,
    DAEMON,
    END,
    ERR,
    EXIT,
    GAVE_UP,
    KEEPER_GONE,
    MAGIC,
    OUT,
    PING,
    REFUSED,
    RESULT,
    SECRET,
    SHARES,
    SILENCE_LIMIT,
    STDIN,
    VARIABLES,
    BadFrame,
    check,
    frame,
    number,
    unpack,
)
from hvdrun.agent.local_ranks import MOST_RANKS, Deliver
from hvdrun.agent.signals import pack
from hvdrun.agent.silence import HOST_TIMEOUT_S, clock
from hvdrun.job.course import Event
from hvdrun.job.events import (
    HostBack,
    HostEnded,
    HostGaveUp,
    HostQuiet,
    HostShares,
    HostSilent,
    HostTalks,
    MpirunSaid,
    SshSaid,
)
from hvdrun.job.far_hosts import SignsOfLife

LINE_EVERY_S = 1.0
_OF_ITS_LOCAL_RANKS = (OUT, ERR, RESULT, KEEPER_GONE)  # what the agent adds to what keepers send


class HostLink:
    """`deliver` gets the messages of the host's ranks, `tell` all other events except the end.
    `on_stdin_wanted` is called when rank 0 can take more input, `on_close` when the connection has
    ended."""

    def __init__(
        self,
        host: str,
        sock: socket.socket,
        stderr: int,
        secret: str,
        selector: selectors.BaseSelector,
        deliver: Deliver,
        tell: Callable[[Event], None],
        on_stdin_wanted: Callable[[HostLink], None],
        on_close: Callable[[HostLink], None],
        host_timeout_s: float = HOST_TIMEOUT_S,
        num_ranks: int = MOST_RANKS,
        variables: bytes | None = None,
    ) -> None:
        self.host = host
        self.sock = sock
        self.stderr = stderr
        self.secret = secret
        self.selector = selector
        self.deliver = deliver
        self.tell = tell
        self.on_stdin_wanted = on_stdin_wanted
        self.on_close = on_close
        self.num_ranks = num_ranks
        self.variables = variables  # of the ranks
        self.talking = False  # the host agent's first message has come
        self.daemon_status: int | None = None  # set once everything there has ended
        self.daemon_said = b""
        self.refused = ""  # why the host agent can't run ranks there
        self.nonsense = ""  # what it has sent that is no message
        self.printed = b""  # before the host agent's first message: by the login shell
        self.buffer = bytearray()
        self.line_at = 0.0
        self.unsent = bytearray()
        self.signs = SignsOfLife(clock(), host_timeout_s)
        # This clock minus the host's: the smallest value seen, which is the true difference plus
        # the fastest transit of a message. Events there seem later than they were by that transit.
        self.clock_ns: int | None = None
        self.closed = False
        self.paused = False  # nothing is read for now
        sock.setblocking(False)
        os.set_blocking(stderr, False)
        selector.register(sock, selectors.EVENT_READ, self._ready)
        selector.register(stderr, selectors.EVENT_READ, self._errors_ready)

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        self.unsent += frame(kind, payload=payload)
        self._flush()

    def end(self, grace_s: float, first: int = signal.SIGTERM) -> None:
        """Ends all ranks there, with this grace. The host keeps listening during the grace: a
        second Ctrl-C ends it at once."""
        if self.talking:
            self.send(END, pack(first, grace_s))
        if not (self.talking and grace_s):
            self.hang_up()

    def tick(self, now: float) -> bool:
        """Asks for a sign of life at intervals; `now` by `clock`. Returns False if none has come
        for too long."""
        signs = self.signs
        signs.look(now)
        if self.paused:
            signs.heard()  # its messages wait unread
        if not self.talking:  # until then ssh's own time limit applies
            signs.heard()
            if now >= self.line_at:
                # Start-up files of the remote shell that read a line would wait for ever.
                self.line_at = now + LINE_EVERY_S
                self.unsent += b"\n"
                self._flush()
            return True
        if signs.wants_asking(now):
            self.send(PING)
        if silent_s := signs.came_back():
            self.tell(HostBack(self.host, silent_s))
        if signs.are_late() and not self._has_unheard():
            if signs.have_stopped():
                return False
            if signs.became_quiet():
                self.tell(HostQuiet(self.host, signs.quiet_s, signs.limit_s))
        return True

    def how_it_fell_silent(self) -> HostSilent:
        return HostSilent(self.host, self.signs.silence.seconds, self.signs.limit_s)

    def _has_unheard(self) -> bool:
        """Whether messages of the host wait unread: then hvdrun was held up, not the host."""
        ready = select.poll()
        ready.register(self.sock, select.POLLIN)
        return bool(ready.poll(0))

    def pause(self, paused: bool) -> None:
        """Stops or resumes reading the host's messages. The first message is read in any case:
        before it, hvdrun sends the host no signs of life."""
        paused = paused and self.talking
        if paused != self.paused:
            self.paused = paused
            self._flush()

    def how_it_ended(self) -> HostEnded:
        said = self.daemon_said if self.talking else self.printed
        return HostEnded(self.host, self.refused, self.daemon_status, said, self.nonsense)

    def hang_up(self) -> None:
        """Sends nothing more to the host. Its agent then ends what is left there, with its own
        grace if hvdrun has sent none."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._read_errors()
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(self.stderr)
            with contextlib.suppress(KeyError):
                self.selector.unregister(self.sock)
            self.sock.close()
            os.close(self.stderr)

    def _flush(self) -> None:
        if self.closed:
            return
        try:
            while self.unsent:
                del self.unsent[: self.sock.send(self.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self.unsent.clear()  # the reading side notices
        events = 0 if self.paused else selectors.EVENT_READ
        events |= selectors.EVENT_WRITE if self.unsent else 0
        with contextlib.suppress(KeyError):
            self.selector.unregister(self.sock)
        if events:
            self.selector.register(self.sock, events, self._ready)

    def _ready(self) -> None:
        if self.unsent:
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
            self.close()
            self.on_close(self)
            return
        self.signs.heard()
        self.buffer += data
        if not self.talking:
            begin = self.buffer.find(MAGIC)
            if begin < 0:  # start-up files of the remote shell may print a lot
                self.printed = (self.printed + data)[-CHUNK:]
                del self.buffer[: -len(MAGIC)]
                return
            del self.buffer[: begin + len(MAGIC)]
            self.talking = True
            self.tell(HostTalks(self.host))
            if self.variables is not None:
                self.send(VARIABLES, self.variables)
            self.send(SECRET, self.secret.encode())
            self.send(SILENCE_LIMIT, b"%g" % self.signs.limit_s)
        try:
            self._take()
        except BadFrame as what:
            self.nonsense = str(what)
            self.close()
            self.on_close(self)

    def _take(self) -> None:
        for kind, rank, payload in unpack(self.buffer):
            if kind == DAEMON:
                self.daemon_said = (self.daemon_said + payload)[-CHUNK:]
                self.tell(MpirunSaid(payload))
            elif kind == STDIN:
                self.on_stdin_wanted(self)
            elif kind == SHARES:
                self.tell(HostShares(self.host))
            elif kind == REFUSED:
                self.refused = payload.decode(errors="replace")
            elif kind == BYE:
                self.daemon_status = number(payload)
            elif kind == GAVE_UP:
                silent_s, _, at_ns = payload.partition(b" ")
                at = self._by_own_clock(number(at_ns)) / 1e9
                self.tell(HostGaveUp(self.host, float(number(silent_s)), at))
            elif kind == PING:
                seen = time.monotonic_ns() - number(payload)
                self.clock_ns = seen if self.clock_ns is None else min(seen, self.clock_ns)
            else:
                if kind not in _OF_ITS_LOCAL_RANKS:
                    check(kind, rank, payload, self.num_ranks)
                elif not 0 <= rank < self.num_ranks:
                    raise BadFrame(f"a message of a rank {rank}")
                if kind in (EXIT, CLOSED):
                    how, _, at_ns = payload.rpartition(b" ")
                    payload = b"%s %d" % (how, self._by_own_clock(int(at_ns)))
                self.deliver(kind, rank, payload)

    def _by_own_clock(self, at_ns: int) -> int:
        return at_ns + (self.clock_ns or 0)

    def _errors_ready(self) -> None:
        if not self.closed:  # the socket, ready at the same moment, may have closed the link
            self._read_errors()

    def _read_errors(self) -> None:
        """Reads once: a pipe holds no more than CHUNK, and its writer may never stop."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.stderr, CHUNK)
            if data:
                self.tell(SshSaid(self.host, data))
            else:
                with contextlib.suppress(KeyError, ValueError):
                    self.selector.unregister(self.stderr)
