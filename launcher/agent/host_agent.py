"""The role `host`: the remote end of hvdrun's connection to a host. It answers what preflight asks,
and then runs MPI's daemon and supervises the ranks there."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import selectors
import shlex
import signal
import sys
import time
from typing import TYPE_CHECKING, NoReturn

from hvdrun.agent import frames, signals
from hvdrun.agent.frames import Waker, frame, unpack, write_all
from hvdrun.agent.local_ranks import LocalRanks
from hvdrun.agent.peers import Stranger, listen
from hvdrun.agent.silence import HOST_TIMEOUT_S, Silence, clock
from hvdrun.machine.environment import (
    FILES,
    PREFIX,
    is_in_step,
    pack_host_variables,
    without_step_variables,
)
from hvdrun.machine.limits import LACKING, raise_open_files, refused_processes
from hvdrun.machine.processes import kill_descendants, kill_strays, remove_sessions, set_subreaper

if TYPE_CHECKING:
    from hvdrun.agent.connecting import Connecting

# How long MPI's daemon may take to end after the ranks; the same if mpirun can't reach it.
DAEMON_PATIENCE_S, SILENT_PATIENCE_S = 1.0, 0.2
LOOK_EVERY_S = 0.25
OPEN_FILES = 4096  # for MPI's daemon and this process: some five of each rank

SHELLS = {"sh": ("/bin/sh",), "csh": ("/bin/csh", "/usr/bin/csh", "/bin/tcsh", "/usr/bin/tcsh")}


def main(arguments: list[str]) -> NoReturn:
    """`arguments`: preflight's question, if it asks this host."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    write_all(1, frames.HELLO)
    if arguments:
        from hvdrun.agent import probe

        write_all(1, probe.facts(arguments[0]))
    agent = HostAgent()
    try:
        status = agent.run()
    except OSError as error:
        if error.errno not in LACKING:
            kill_descendants()
            raise
        status = agent.give_up(f"lacks {error.errno}")
    # MPI waits for ssh, which waits for every process that holds its ends.
    os._exit(status)


class HostAgent:
    """Runs MPI's daemon and supervises the ranks of this host, once hvdrun starts the job. Ends
    both when hvdrun says so, closes the connection or falls silent. Without a daemon (if srun
    starts the ranks) it runs until then."""

    def __init__(self) -> None:
        self.command = ""  # of the daemon
        self.selector = selectors.DefaultSelector()
        self.buffer = bytearray()
        self.unheeded: list[
            tuple[bytes, int, bytes]
        ] = []  # frames that arrived while it was writing
        self.silence = Silence(clock())  # hvdrun's
        self.silence_limit_s = HOST_TIMEOUT_S
        self.end_at: float | None = None  # when to kill everything
        self.patience_s = DAEMON_PATIENCE_S
        self.has_reader = True  # whether hvdrun still reads
        self.daemon = 0
        self.refused_processes = refused_processes()
        self.status = 0
        self.test: Connecting | None = None  # of the network, before the job starts
        self.stdin = -1  # the pipe to rank 0, once rank 0 runs here
        self.is_set_up = False
        self.local_ranks: LocalRanks | None = None
        self.variables: bytes | None = None  # the ranks', from hvdrun

    def _stdin_of_rank_0(self) -> int:
        reader, self.stdin = os.pipe()
        self._send(frames.STDIN, -1, b"")
        return reader

    def _send(self, kind: bytes, rank: int, payload: bytes) -> None:
        view = memoryview(frame(kind, rank, payload) if self.has_reader else b"")
        while view:
            try:
                view = view[os.write(1, view) :]
            except BlockingIOError:
                if not self._await_room():
                    return
            except BrokenPipeError:
                self._lose_reader()
                return

    def _await_room(self) -> bool:
        """Waits while hvdrun does not read, as nobody reads its output. False once hvdrun is gone:
        it sends no sign of life, or the connection has ended."""
        ready, _, _ = select.select([0], [1], [], LOOK_EVERY_S)
        if self._is_silent():
            self._lose_reader(frames.SILENT_GRACE_S, SILENT_PATIENCE_S)
        elif (ready and not self._receive()) or self._is_overdue():
            self._lose_reader()
        # Other frames wait until this one is written.
        for kind, rank, payload in unpack(self.buffer):
            if kind == frames.END:
                self._end_as_told(payload)
            else:
                self.unheeded.append((kind, rank, payload))
        return self.has_reader

    def _lose_reader(
        self, grace_s: float = frames.GRACE_S, patience_s: float = DAEMON_PATIENCE_S
    ) -> None:
        """Stops sending to hvdrun; the ranks still get their grace to end."""
        self.has_reader = False
        if self.local_ranks:
            self.local_ranks.drains = False
        self._end(grace_s, patience_s)

    def _is_overdue(self) -> bool:
        return self.end_at is not None and time.monotonic() > self.end_at

    def _is_silent(self) -> bool:
        """Whether hvdrun has been silent for too long, and the ranks are not being ended yet."""
        self.silence.look(clock())
        return self.end_at is None and self.silence.seconds >= self.silence_limit_s

    def _give_up(self) -> None:
        """hvdrun learns why if it runs again, or if only this direction still works."""
        self._end(frames.SILENT_GRACE_S, SILENT_PATIENCE_S)
        self._send(frames.GAVE_UP, -1, b"%d %d" % (self.silence.seconds, time.monotonic_ns()))

    def _send_clock(self) -> None:
        self._send(frames.PING, -1, b"%d" % time.monotonic_ns())

    def _deliver(self, kind: bytes, rank: int, payload: bytes) -> None:
        self._send(kind, rank, payload)
        if kind == frames.RANK:
            self._send_clock()
        elif kind == frames.KEEPER_GONE and self.local_ranks and not self.local_ranks.keepers:
            kill_strays()

    def run(self) -> int:
        """The exit code of MPI's daemon, for MPI."""
        set_subreaper()
        before = raise_open_files(OPEN_FILES)
        if before is not None:
            os.environ[FILES] = str(before)  # the keepers give it back to the ranks
        for fd in (0, 1):
            os.set_blocking(fd, False)
        self._send_clock()
        waker = Waker([signal.SIGCHLD, *signals.FOR_THE_JOB])
        self.selector.register(0, selectors.EVENT_READ, self._hear)
        self.selector.register(waker.fd, selectors.EVENT_READ, waker.read)
        while self._reap() or self._is_held() or (self.local_ranks and self.local_ranks.keepers):
            for key, _ in self.selector.select(LOOK_EVERY_S):
                key.data()
                if self._is_overdue():
                    break
            if self.test:
                self.test.tick()
            if self._is_silent():
                self._give_up()
            if self.end_at is not None and not (self.local_ranks and self.local_ranks.keepers):
                # A daemon that can't reach mpirun would wait for it.
                self.end_at = min(self.end_at, time.monotonic() + self.patience_s)
            if self._is_overdue():
                break
        has_begun = self.local_ranks is not None and self.local_ranks.sessions
        if self.status and not has_begun and refused_processes() > self.refused_processes:
            self._send(
                frames.REFUSED, -1, b"lacks %d" % errno.EAGAIN
            )  # MPI's daemon may not say it
        self._send(frames.BYE, -1, b"%d" % self.status)
        if self.local_ranks:
            self.local_ranks.kill(self.patience_s)
        kill_descendants()
        remove_sessions(self.local_ranks.sessions if self.local_ranks else ())
        return self.status

    def give_up(self, why: str) -> int:
        """Tells hvdrun why this host can't run ranks, and ends what runs here."""
        self._send(frames.REFUSED, -1, why.encode())
        self._send(frames.BYE, -1, b"1")
        kill_descendants()
        remove_sessions(self.local_ranks.sessions if self.local_ranks else ())
        return 1

    def _obey(self, order: bytes) -> None:
        """An order of preflight's."""
        import json  # a job without preflight does not need it

        from hvdrun.agent.connecting import Connecting

        if self.test is None:
            self.test = Connecting(
                self.selector,
                lambda answer: self._send(frames.ORDER, -1, json.dumps(answer).encode()),
            )
        self.test.obey(json.loads(order))

    def _set_up(self, payload: bytes) -> None:
        """hvdrun starts the job."""
        if self.test:
            self.test.close()
            self.test = None
        secret, limit_s, shell, command = payload.split(b"\0")
        self.is_set_up = True
        self.silence_limit_s = float(limit_s)
        self.command = command.decode(errors="surrogateescape")
        self.status = 1 if command else 0
        try:
            listener = listen(secret.decode())
        except (Stranger, OSError) as problem:
            if isinstance(problem, OSError) and problem.errno in LACKING:
                raise
            self._send(frames.REFUSED, -1, str(problem).encode())
            self.status = 1
            self._end(0)
            return
        if listener is None:
            self._send(frames.SHARES, -1, b"")
        else:
            self.local_ranks = LocalRanks(
                listener,
                self.selector,
                self._deliver,
                self._stdin_of_rank_0,
                pack_host_variables(os.environ),
                variables=self.variables,
            )
        if self.command:
            self.daemon = self._start_daemon(shell.decode())

    def _is_held(self) -> bool:
        return self.end_at is None and not (self.is_set_up and self.command)

    def _reap(self) -> bool:
        """False if no child is left. A daemon that puts itself into the background becomes a child
        of this process again."""
        try:
            while True:
                pid, raw = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return True
                if pid == self.daemon:
                    code = os.waitstatus_to_exitcode(raw)
                    self.status = code if code >= 0 else 128 - code
        except ChildProcessError:
            return False

    def _start_daemon(self, shell: str) -> int:
        pid, reader = start_daemon(self.command, shell)

        def read() -> None:
            data = os.read(reader, frames.CHUNK)
            if data:
                self._send(frames.DAEMON, -1, data)
            else:
                self.selector.unregister(reader)

        self.selector.register(reader, selectors.EVENT_READ, read)
        return pid

    def _receive(self) -> bool:
        """False at the end of the connection."""
        try:
            data = os.read(0, frames.CHUNK)
        except BlockingIOError:  # already read, while there was no room to write
            return True
        except ConnectionResetError:
            data = b""
        self.silence.heard()
        self.buffer += data
        if not self.is_set_up:  # hvdrun's empty lines are for start-up files that read
            del self.buffer[: len(self.buffer) - len(self.buffer.lstrip(b"\n"))]
        return bool(data)

    def _hear(self) -> None:
        connected = self._receive()
        heard = [*self.unheeded, *unpack(self.buffer)]
        self.unheeded.clear()
        for kind, _, payload in heard:
            if kind == frames.PING:
                self._send_clock()
            elif kind == frames.END:
                self._end_as_told(payload)
            elif kind == frames.RELEASE and self.local_ranks:
                self.local_ranks.release()
            elif kind == frames.SIGNAL and self.local_ranks:
                self.local_ranks.pass_on(payload)
            elif kind == frames.LOOK and self.local_ranks:
                rank, _, what = payload.partition(b" ")
                self.local_ranks.look(int(rank), what)
            elif kind == frames.STDIN:
                self._feed(payload)
            elif kind == frames.VARIABLES:
                self.variables = payload
            elif kind == frames.ORDER:
                self._obey(payload)
            elif kind == frames.START and not self.is_set_up:
                self._set_up(payload)
        if not connected:
            self.selector.unregister(0)
            self._end(frames.GRACE_S)

    def _feed(self, data: bytes) -> None:
        if not data:
            os.close(self.stdin)
            return
        # hvdrun sends no more before the answer, so never more than this waits here.
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
                self._send(frames.STDIN, -1, b"")

        self.selector.register(self.stdin, selectors.EVENT_WRITE, write)

    def _end_as_told(self, payload: bytes) -> None:
        first, grace_s = signals.unpack(payload)
        self._end(grace_s, first=first)

    def _end(
        self,
        grace_s: float,
        patience_s: float = DAEMON_PATIENCE_S,
        first: int = signal.SIGTERM,
    ) -> None:
        """A later call counts only if it ends things sooner: a rank gets one TERM."""
        at = time.monotonic() + signals.length_s(first, grace_s) + 1
        if self.end_at is not None and at >= self.end_at:
            return
        self.end_at, self.patience_s = at, patience_s
        if self.local_ranks:
            self.local_ranks.end(grace_s, first)


def start_daemon(command: str, shell: str) -> tuple[int, int]:
    """The daemon's pid, and a pipe with all that it prints. `shell`: for which the command is
    written, sh or csh."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(writer, 1)
            os.dup2(writer, 2)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            given = dict(os.environ)
            environment = without_step_variables(given) if is_in_step(given) else given
            environment[PREFIX] = _prefix()
            command = safe_prefix(command, _prefix())
            # Not the login shell of this host, for which MPI has not written the command.
            for path in SHELLS[shell]:
                with contextlib.suppress(OSError):
                    os.execve(path, [path, "-c", command], environment)
            missing = "no csh or tcsh" if shell == "csh" else "no /bin/sh"
            write_all(2, f"hvdrun: there is {missing} for MPI's daemon\n".encode())
        finally:
            os._exit(127)
    os.close(writer)
    return pid, reader


def _prefix() -> str:
    """The folder of this installation, which may contain MPI's daemons. The same on every host."""
    return os.path.dirname(os.path.dirname(sys.executable))


def safe_prefix(command: str, folder: str) -> str:
    """MPI's command for the remote shell. MPIs do not quote their own path for a shell: where that
    matters, a variable replaces it, which the shell does not split at blanks."""
    if shlex.quote(folder) == folder:
        return command
    return f"IFS=; set -f; {command.replace(folder, '${' + PREFIX + '}')}"
