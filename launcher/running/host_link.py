"""hvdrun's connection to a host agent while the job runs.

It turns incoming messages into events for `course`, and does not know what they mean for the job.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence

from hvdrun.agent import frames
from hvdrun.agent.frames import BadFrame, check, frame, number, send
from hvdrun.agent.host_connection import HostConnection, connect
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
from hvdrun.machine.limits import LACKING

_OF_ITS_LOCAL_RANKS = (
    frames.OUT,
    frames.ERR,
    frames.RESULT,
    frames.KEEPER_GONE,
)  # what the agent adds to what keepers send


class HostLink:
    """`asker`: the role ssh, which waits for the end of MPI's daemon; `wish`: its words (see HOST);
    `kept`: preflight's connection to the host, if there is one; `environ`: for a new one. `deliver`
    gets the messages of the host's ranks, `tell` all other events except the end. `on_stdin_wanted`
    is called when rank 0 can take more input, `on_close` when the connection has ended."""

    def __init__(
        self,
        asker: socket.socket,
        wish: Sequence[bytes],
        kept: HostConnection | None,
        environ: Mapping[str, str],
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
        host, _, *self.daemon = wish[:4]
        self.host = host.decode(errors="replace")
        self.secret = secret
        self.deliver = deliver
        self.tell = tell
        self.on_stdin_wanted = on_stdin_wanted
        self.on_close = on_close
        self.num_ranks = num_ranks
        self.variables = variables  # of the ranks
        self.daemon_status: int | None = None  # set once everything there has ended
        self.daemon_said = b""
        self.refused = ""  # why the host agent can't run ranks there
        self.signs = SignsOfLife(clock(), host_timeout_s)
        # This clock minus the host's: the smallest value seen, which is the true difference plus
        # the fastest transit of a message. Events there seem later than they were by that transit.
        self.clock_ns: int | None = None
        self.selector = selector
        self.asker: socket.socket | None = asker
        selector.register(asker, selectors.EVENT_READ, self._asker_left)
        if kept is not None:
            kept.give_to(self, selector)
        self.connection = kept or self._connect([*map(os.fsdecode, wish[4:])], environ)

    def _connect(self, argv: Sequence[str], environ: Mapping[str, str]) -> HostConnection:
        try:
            return connect(argv, environ, self, self.selector)
        except OSError as error:
            if error.errno in LACKING:
                raise
            # As if the program had said it.
            text = f"{argv[0]}: {error.strerror}"
            if os.path.basename(argv[0]) == "ssh":
                text += " (Debian: apt-get install openssh-client)"
            argv = ("/bin/sh", "-c", 'echo "$0" >&2; exit 127', text)
            return connect(argv, environ, self, self.selector)

    def begin(self) -> None:
        if self.talking:
            self.on_hello()

    @property
    def talking(self) -> bool:
        return self.connection.talks

    @property
    def closed(self) -> bool:
        return self.connection.closed

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        self.connection.send(kind, payload)

    def end(self, grace_s: float, first: int = signal.SIGTERM) -> None:
        """Ends all ranks there, with this grace. The host keeps listening during the grace: a
        second Ctrl-C ends it at once."""
        if self.talking:
            self.send(frames.END, pack(first, grace_s))
        if not (self.talking and grace_s):
            self.hang_up()

    def tick(self, now: float) -> bool:
        """Asks for a sign of life at intervals; `now` by `clock`. Returns False if none has come
        for too long."""
        signs = self.signs
        signs.look(now)
        if self.connection.paused:
            signs.heard()  # its messages wait unread
        if not self.talking:  # until then ssh's own time limit applies
            signs.heard()
            self.connection.prompt(now)
            return True
        if signs.wants_asking(now):
            self.send(frames.PING)
        if silent_s := signs.came_back():
            self.tell(HostBack(self.host, silent_s))
        # If messages of the host wait unread, hvdrun was held up, not the host.
        if signs.are_late() and not self.connection.has_unread():
            if signs.have_stopped():
                return False
            if signs.became_quiet():
                self.tell(HostQuiet(self.host, signs.quiet_s, signs.limit_s))
        return True

    def how_it_fell_silent(self) -> HostSilent:
        return HostSilent(self.host, self.signs.silence.seconds, self.signs.limit_s)

    def pause(self, paused: bool) -> None:
        """Stops or resumes reading the host's messages. The first message is read in any case:
        before it, hvdrun sends the host no signs of life."""
        self.connection.pause(paused)

    def how_it_ended(self) -> HostEnded:
        said = self.daemon_said if self.talking else self.connection.printed
        nonsense = self.connection.nonsense
        return HostEnded(self.host, self.refused, self.daemon_status, said, nonsense)

    def hang_up(self) -> None:
        """Sends nothing more to the host. Its agent then ends what is left there, with its own
        grace if hvdrun has sent none."""
        self.connection.hang_up()

    def close(self) -> None:
        self.connection.close()
        process = self.connection.process
        if process is not None and process.poll() is None:
            # It ends by itself, or by kill_descendants, which waits for it.
            process.returncode = 0
        self._answer(frames.SSH_FAILED)

    def _answer(self, status: int) -> None:
        """The role ssh ends with it, as ssh does."""
        if self.asker is not None:
            with contextlib.suppress(OSError):
                send(self.asker, frame(frames.BYE, payload=b"%d" % status))
            self._forget_asker()

    def _asker_left(self) -> None:
        """mpirun no longer wants the daemon there."""
        self._forget_asker()
        self.hang_up()

    def _forget_asker(self) -> None:
        if self.asker is not None:
            self.selector.unregister(self.asker)
            self.asker.close()
            self.asker = None

    # ------------------------------------------------------------ what comes on the connection

    def on_hello(self) -> None:
        self.tell(HostTalks(self.host))
        if self.variables is not None:
            self.send(frames.VARIABLES, self.variables)
        job = (self.secret.encode(), b"%g" % self.signs.limit_s, *self.daemon)
        self.send(frames.START, b"\0".join(job))

    def on_data(self) -> None:
        self.signs.heard()

    def on_errors(self, data: bytes) -> None:
        self.tell(SshSaid(self.host, data))

    def on_end(self) -> None:
        self.close()
        self.on_close(self)

    def on_frame(self, kind: bytes, rank: int, payload: bytes) -> None:
        if kind == frames.DAEMON:
            self.daemon_said = (self.daemon_said + payload)[-frames.CHUNK :]
            self.tell(MpirunSaid(payload))
        elif kind == frames.STDIN:
            self.on_stdin_wanted(self)
        elif kind == frames.SHARES:
            self.tell(HostShares(self.host))
        elif kind == frames.REFUSED:
            self.refused = payload.decode(errors="replace")
        elif kind == frames.BYE:
            self.daemon_status = min(number(payload), 255)
            self._answer(self.daemon_status)
        elif kind == frames.GAVE_UP:
            silent_s, _, at_ns = payload.partition(b" ")
            at = self._by_own_clock(number(at_ns)) / 1e9
            self.tell(HostGaveUp(self.host, float(number(silent_s)), at))
        elif kind == frames.PING:
            seen = time.monotonic_ns() - number(payload)
            self.clock_ns = seen if self.clock_ns is None else min(seen, self.clock_ns)
        else:
            if kind not in _OF_ITS_LOCAL_RANKS:
                check(kind, rank, payload, self.num_ranks)
            elif not 0 <= rank < self.num_ranks:
                raise BadFrame(f"a message of a rank {rank}")
            if kind in (frames.EXIT, frames.CLOSED):
                how, _, at_ns = payload.rpartition(b" ")
                payload = b"%s %d" % (how, self._by_own_clock(int(at_ns)))
            self.deliver(kind, rank, payload)

    def _by_own_clock(self, at_ns: int) -> int:
        return at_ns + (self.clock_ns or 0)
