"""The side of every node but node 0: connects to node 0, runs what that asks for, and ends with the
job's exit code."""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping

from hvdrun.agent import frames, peers
from hvdrun.agent.frames import Waker, number
from hvdrun.agent.signals import FOR_THE_JOB, heeded
from hvdrun.agent.silence import Silence, clock
from hvdrun.errors import HostLost, HostSetupError, StartTimeout
from hvdrun.machine.environment import inheritable
from hvdrun.machine.processes import kill_descendants, set_subreaper
from hvdrun.rendezvous.messages import (
    HELLO,
    RUN,
    SAY,
    STREAM,
    STREAM_S,
    WELCOME,
    Hello,
    Run,
    pack_hello,
    unpack_run,
)
from hvdrun.rendezvous.place import Place
from hvdrun.rendezvous.relay import Relay
from hvdrun.rendezvous.sealed import CLOSED_EARLY, NOT_PROVED, SealedSocket
from hvdrun.rendezvous.secret import hint, name_here

CONNECT_S = 5.0
TURN_S = 0.25
PING_EVERY_S = 1.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0  # between two tries
FIRST_LINE_S, LINE_EVERY_S = 3.0, 15.0
# After node 0 is gone, MPI's daemon and the ranks here have so long to end: they notice it, too.
ENDING_S = 30.0


class ToNode0:
    """How this node connects to it. `only_this_user`: without a secret; node 0 must be this user's
    or root's, on this machine."""

    def __init__(self, place: Place, only_this_user: bool) -> None:
        self.place = place
        self.only_this_user = only_this_user
        # Of node 0: the family, and the whole address, as a link-local one of IPv6 needs its scope.
        self.found: tuple[int, tuple[object, ...]] | None = None

    def settle(self, sock: socket.socket) -> None:
        """Node 0 is at the other end. Later connections are to the same address, without asking for
        that of its name again. Raises OSError if the connection has ended."""
        self.found = sock.family, sock.getpeername()

    def connect(self) -> socket.socket | str:
        """A connection to node 0, or why there is none."""
        try:
            if self.only_this_user:
                here = peers.connect(name_here(self.place.port))
                return os.strerror(errno.ECONNREFUSED) if here is None else here
            sock = self._connect()
        except peers.Stranger as stranger:
            return str(stranger)
        except socket.gaierror:
            return f"the name {self.place.host} is unknown here"
        except UnicodeError:
            return (
                f"{self.place.host} is no name: a part of it is empty, or longer than 63 characters"
            )
        except TimeoutError:
            return "it does not answer"
        except OSError as error:
            return error.strerror or str(error)
        if _is_itself(sock):
            sock.close()
            return "nothing listens there"
        return sock

    def _connect(self) -> socket.socket:
        if self.found is None:
            return socket.create_connection((self.place.host, self.place.port), CONNECT_S)
        family, address = self.found
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(CONNECT_S)
            sock.connect(address)
        except OSError:
            sock.close()
            raise
        return sock


def _is_itself(sock: socket.socket) -> bool:
    """TCP can connect a free port to itself."""
    try:
        return bool(sock.getsockname() == sock.getpeername())
    except OSError:  # it has been closed already, which its reader finds out
        return False


class Program:
    """A program that runs here for node 0."""

    def __init__(self, process: subprocess.Popen[bytes], relay: Relay) -> None:
        self.process = process
        self.relay = relay
        self.code: int | None = None


class Wanted:
    """A program that node 0 wants here, and whose connection is still to be made."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.until = time.monotonic() + STREAM_S  # node 0 waits so long
        self.try_until = self.until  # for node 0 to prove itself on the present connection
        self.next_at = 0.0
        self.pause_s = FIRST_PAUSE_S


class OtherNode:
    def __init__(self, place: Place, key: bytes, own: Hello, only_this_user: bool) -> None:
        self.place = place
        self.key = key
        self.own = own
        self.way = ToNode0(place, only_this_user)
        self.selector = selectors.DefaultSelector()
        self.connection: SealedSocket | None = None
        self.problem = ""  # of the present connection
        self.is_welcome = False
        self.refused = ""
        self.result: int | None = None
        self.is_lost = False
        self.was_signalled = False
        self.silence = Silence(clock())
        self.silence_limit_s = 30.0
        self.ping_at = 0.0
        self.programs: list[Program] = []
        self.wanted: list[Wanted] = []  # for another try
        self.unstarted: dict[SealedSocket, Wanted] = {}

    def run(self, limit_s: float, say: Callable[[str], None]) -> int:
        """The job's exit code. `limit_s`: for node 0 to accept this one.

        Raises StartTimeout; HostSetupError if node 0 says that this node does not fit; HostLost if
        the connection ends before the job.
        """
        self.say = say
        try:
            self._join(limit_s)
            # From now on signals are for the whole job.
            waker = Waker([signal.SIGCHLD, *heeded()])
            say(
                f"hvdrun: this is node {self.place.node_rank} of {self.place.nodes}; what the ranks"
                f" print is shown on node 0 ({self.place.host})"
            )
            return self._serve(waker)
        finally:
            for program in self.programs:
                program.relay.close()
            kill_descendants()

    # ------------------------------------------------------------- joining

    def _join(self, limit_s: float) -> None:
        begin = time.monotonic()
        line_at, pause_s, why = begin + FIRST_LINE_S, FIRST_PAUSE_S, ""
        while True:
            why = self._try(begin + limit_s)
            if self.refused:
                raise HostSetupError(self.refused)
            if self.is_welcome:
                return
            now = time.monotonic()
            if now + pause_s > begin + limit_s:
                more = hint(self.place.host, self.way.only_this_user)
                raise StartTimeout(
                    f"node {self.place.node_rank} found no node 0 at {self.place.meets_at}"
                    f" ({self.place.source}) within {limit_s:g} s: {why}; start the same command on"
                    f" node 0{more}; --start-timeout gives more time"
                )
            if now > line_at:
                line_at = now + LINE_EVERY_S
                self.say(f"hvdrun: waiting for node 0 at {self.place.meets_at}: {why}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _try(self, until: float) -> str:
        """Why node 0 has not accepted this node; "" if it has."""
        sock = self.way.connect()
        if isinstance(sock, str):
            return sock
        self.problem = ""
        self.connection = SealedSocket(
            sock, self.key, self.selector, self._heard, self._ended, is_caller=True
        )
        self.connection.send(HELLO, pack_hello(self.own))
        until = min(until, time.monotonic() + CONNECT_S)
        while not (self.is_welcome or self.refused or self.problem):
            if time.monotonic() > until:
                self.connection.close()
                return "it does not answer"
            for key, _ in self.selector.select(0.1):
                key.data()
        return self.problem

    def _ended(self, connection: SealedSocket, why: str) -> None:
        if why in (CLOSED_EARLY, NOT_PROVED):
            why += "; the secret must be the same on both hosts"
        self.problem = why or "it closed the connection"
        self.is_lost = self.is_welcome

    # ------------------------------------------------------------- the job

    def _serve(self, waker: Waker) -> int:
        set_subreaper()
        self.selector.register(waker.fd, selectors.EVENT_READ, lambda: self._signals(waker.read()))
        while self.result is None:
            self._turn()
            self._look_at_node_0()
            if self.is_lost:
                self._end_without_node_0()
        return self.result

    def _turn(self) -> None:
        for key, _ in self.selector.select(TURN_S):
            key.data()
        for program in list(self.programs):
            self._look_at(program)
        now = time.monotonic()
        for wanted in [wanted for wanted in self.wanted if wanted.next_at <= now]:
            self.wanted.remove(wanted)
            self._call_back(wanted)
        for connection in [c for c, wanted in self.unstarted.items() if wanted.try_until <= now]:
            connection.close()
            self._call_back_later(connection, "it does not answer")

    def _look_at_node_0(self) -> None:
        now = clock()
        self.silence.look(now)
        assert self.connection is not None
        if now >= self.ping_at:
            self.ping_at = now + PING_EVERY_S
            self.connection.send(frames.PING)
        if self.silence.seconds > self.silence_limit_s:
            self.problem = f"it has been silent for {self.silence.seconds:.0f} s"
            self.connection.close()
            self.is_lost = True

    def _end_without_node_0(self) -> None:
        """The programs here have lost their connections as well, and end what they have started."""
        until = time.monotonic() + ENDING_S
        for program in self.programs:
            program.relay.close()
        self.was_signalled = False
        while time.monotonic() < until and any(p.process.poll() is None for p in self.programs):
            for key, _ in self.selector.select(0.1):
                key.data()
            if self.was_signalled:  # somebody does not want to wait
                break
        raise HostLost(
            f"node {self.place.node_rank} lost node 0 at {self.place.meets_at}: {self.problem}; its"
            " own messages say why"
        )

    def _heard(self, connection: SealedSocket, kind: bytes, payload: bytes) -> None:
        self.silence.heard()
        if kind == WELCOME:
            self.is_welcome = True
            with contextlib.suppress(OSError):  # whose end is noticed at once
                self.way.settle(connection.sock)
            self.silence_limit_s = number(payload) / 1000
        elif kind == frames.REFUSED:
            self.refused = payload.decode(errors="replace")
        elif kind == RUN and self.is_welcome:
            self._call_back(Wanted(unpack_run(payload)))
        elif kind == SAY:
            self.say(payload.decode(errors="replace"))
        elif kind == frames.BYE:
            self.result = number(payload)

    def _signals(self, numbers: bytes) -> None:
        """All but CHLD are for the whole job: node 0 decides what they do."""
        for each in numbers:
            self.was_signalled |= each in FOR_THE_JOB
            if each in FOR_THE_JOB and self.connection is not None:
                self.connection.send(frames.SIGNAL, b"%d" % each)

    # ------------------------------------------------------------- programs

    def _call_back(self, wanted: Wanted) -> None:
        """Makes the connection for a program, which starts once node 0 has proved itself there."""
        sock = self.way.connect()
        if isinstance(sock, str):
            self._try_later(wanted, sock)
            return
        connection = SealedSocket(
            sock, self.key, self.selector, self._stream_message, self._stream_ended, is_caller=True
        )
        self.unstarted[connection] = wanted
        wanted.try_until = time.monotonic() + CONNECT_S
        connection.on_proved = lambda: self._start(connection)

    def _call_back_later(self, connection: SealedSocket, why: str) -> None:
        """The connection has ended before node 0 has proved itself there."""
        self._try_later(self.unstarted.pop(connection), why)

    def _try_later(self, wanted: Wanted, why: str) -> None:
        wanted.next_at = time.monotonic() + wanted.pause_s
        wanted.pause_s = min(2 * wanted.pause_s, LONGEST_PAUSE_S)
        if wanted.next_at < wanted.until:
            self.wanted.append(wanted)
        else:  # node 0 says which host has not answered
            self.say(
                f"hvdrun: node {self.place.node_rank} could not connect to node 0 at"
                f" {self.place.meets_at} once more, to run a program for it: {why}"
            )

    def _start(self, connection: SealedSocket) -> None:
        run = self.unstarted.pop(connection).run
        connection.send(STREAM, run.number.encode())
        try:
            process = subprocess.Popen(
                run.argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=_environment(os.environ, connection.sock),
                start_new_session=True,
            )
        except OSError as error:
            connection.send(frames.ERR, f"{run.argv[0]}: {error.strerror}\n".encode())
            connection.send(frames.EXIT, b"127")
            return
        assert process.stdin
        assert process.stdout
        assert process.stderr
        fds = [os.dup(pipe.fileno()) for pipe in (process.stdin, process.stdout, process.stderr)]
        for pipe in (process.stdin, process.stdout, process.stderr):
            pipe.close()
        relay = Relay(
            connection,
            self.selector,
            {frames.OUT: fds[1], frames.ERR: fds[2]},
            {frames.STDIN: fds[0]},
        )
        self.programs.append(Program(process, relay))

    def _look_at(self, program: Program) -> None:
        if program.code is None:
            code = program.process.poll()
            if code is None:
                return
            program.code = code if code >= 0 else 128 - code
        if program.relay.read_rest():
            program.relay.connection.send(frames.EXIT, b"%d" % program.code)
            program.relay.close_here()  # node 0 ends the connection
            self.programs.remove(program)

    def _stream_message(self, connection: SealedSocket, kind: bytes, payload: bytes) -> None:
        for program in self.programs:
            if program.relay.connection is connection:
                program.relay.give(kind, payload)

    def _stream_ended(self, connection: SealedSocket, why: str) -> None:
        """As sshd does: the program's input ends, and nobody reads its output any more."""
        if connection in self.unstarted:
            self._call_back_later(connection, why or "it closed the connection")
        for program in self.programs:
            if program.relay.connection is connection:
                program.relay.close()


def _environment(environ: Mapping[str, str], sock: socket.socket) -> dict[str, str]:
    """What a program here gets, with the addresses of the connection, as ssh's server shows them;
    one within the machine has none."""
    environment = inheritable(environ)
    environment.pop("SSH_CONNECTION", None)  # of the terminal that hvdrun was started in
    if sock.family == socket.AF_UNIX:
        return environment
    with contextlib.suppress(OSError):
        (near, near_port, *_), (far, far_port, *_) = sock.getsockname(), sock.getpeername()
        environment["SSH_CONNECTION"] = f"{far} {far_port} {near} {near_port}"
    return environment
