"""Supervises the ranks of one host: the supervisor's end of the connections to their keepers."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import selectors
import signal
import socket
import termios
import time
from collections.abc import Callable, Iterable

from hvdrun.agent import frames
from hvdrun.agent.frames import BadFrame, check, frame, has_key, receive, send_some, unpack
from hvdrun.agent.signals import pack
from hvdrun.machine.shared_memory import SharedFiles
from hvdrun.machine.socket_users import is_trusted

MOST_RANKS = 1 << 24  # of a job, where its size is not known
CLEAN_UP_S = 1.0  # for all keepers of a host together, from KILL on
Deliver = Callable[[bytes, int, bytes], None]


class _Keeper:
    """A connection to the keeper of one rank."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.buffer = bytearray()
        self.unsent = bytearray()
        self.fds: list[int] = []
        self.rank = -1
        self.job = b""  # its name in MPI, if the keeper knows it
        self.outputs: dict[int, bytes] = {}  # descriptor → OUT or ERR


class LocalRanks:
    """The ranks of this host: reads their output, learns how they end, can end them.

    Both hvdrun and the host agents have one. It calls `deliver(kind, rank, payload)` with RANK,
    OUT, ERR, RESULT, MPI_BEGUN, MPI_DONE, NOTE, LOOKED, CLOSED, SIGNALLED, BLACK_BOX,
    BLACK_BOX_NOW, EXIT and KEEPER_GONE (with what it has sent, if that was no message and the
    connection was closed for it); a rank's output, result, notes and black box come before its
    EXIT.
    """

    def __init__(
        self,
        listener: int,
        selector: selectors.BaseSelector,
        deliver: Deliver,
        stdin_of_rank_0: Callable[[], int],
        host_variables: bytes = b"",
        on_host: Callable[[socket.socket, list[bytes]], None] | None = None,
        num_ranks: int = MOST_RANKS,
        variables: bytes | None = None,
        secret: str = "",
    ) -> None:
        """variables: the job's, if MPI does not bring them. secret: the job's key; who wants
        something on another host must know it."""
        self.secret = secret
        self.variables = variables
        self.selector = selector
        self.deliver = deliver
        self.stdin_of_rank_0 = stdin_of_rank_0
        self.host_variables = host_variables
        self.on_host = on_host
        self.num_ranks = num_ranks
        self.sessions: set[str] = set()  # folders of MPI's daemons
        self.keepers: set[_Keeper] = set()
        self.ending: bytes | None = None
        self.paused = False
        self.drains = True  # whether somebody reads the last output of ranks that have ended
        self.listener = socket.socket(fileno=listener)
        selector.register(self.listener, selectors.EVENT_READ, self._accept)

    def end(self, grace_s: float, first: int = signal.SIGTERM) -> None:
        """Ends all ranks, also those that start later: see `signals.steps`."""
        self.ending = frame(frames.END, payload=pack(first, grace_s))
        self._send(self.ending)

    def release(self) -> None:
        """The keepers may end: all ranks of the job have."""
        self._send(frame(frames.RELEASE))

    def pass_on(self, request: bytes) -> None:
        """Passes a signal on to all ranks that have started; their keepers answer."""
        self._send(frame(frames.SIGNAL, payload=request))

    def _send(self, message: bytes) -> None:
        for keeper in self.keepers:
            if keeper.rank >= 0:  # all others get `ending` when they begin
                self._post(keeper, message)

    def _post(self, keeper: _Keeper, message: bytes, fds: Iterable[int] = ()) -> None:
        """Never blocks: a keeper that is stopped does not read. fds: with its first message."""
        keeper.unsent += message
        try:
            while keeper.unsent:
                del keeper.unsent[: send_some(keeper.sock, keeper.unsent, fds)]
                fds = ()
        except BlockingIOError:
            pass
        except OSError:
            keeper.unsent.clear()  # reading from a keeper notices that it is gone
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if keeper.unsent else 0)
        key = self.selector.get_key(keeper.sock)
        if key.events != events:
            self.selector.modify(keeper.sock, events, key.data)

    def look(self, rank: int, what: bytes = b"") -> None:
        """Asks the rank's keeper, if it is on this host, what the rank does. what: WITH_STACK,
        WITH_STACK_AND_BOX, or nothing more."""
        for keeper in self.keepers:
            if keeper.rank == rank:
                self._post(keeper, frame(frames.LOOK, payload=what))

    def kill(self, patience_s: float = CLEAN_UP_S) -> None:
        """Kills all ranks, and gives their keepers `patience_s` to remove MPI's files. Output that
        was not read yet is lost."""
        self.end(0)
        waiting = select.poll()
        for keeper in self.keepers:
            waiting.register(keeper.sock, 0)  # POLLHUP when the keeper has ended
        left = len(self.keepers)
        end = time.monotonic() + patience_s
        while left and (ms := 1000 * (end - time.monotonic())) > 0:
            for fd, _ in waiting.poll(ms):
                waiting.unregister(fd)
                left -= 1

    def pause(self, paused: bool) -> None:
        """Stops or resumes reading the ranks' output; meanwhile it stays in their pipes."""
        if paused == self.paused:
            return
        self.paused = paused
        for keeper in self.keepers:
            for fd in keeper.outputs:
                if paused:
                    self.selector.unregister(fd)
                else:
                    self._listen(keeper, fd)

    def _listen(self, keeper: _Keeper, fd: int) -> None:
        self.selector.register(fd, selectors.EVENT_READ, lambda: self._output(keeper, fd))

    def _accept(self) -> None:
        sock, _ = self.listener.accept()
        if not is_trusted(sock):
            sock.close()
            return
        sock.setblocking(False)
        keeper = _Keeper(sock)
        self.keepers.add(keeper)
        self.selector.register(sock, selectors.EVENT_READ, lambda: self._hear(keeper))

    def _hear(self, keeper: _Keeper) -> None:
        if keeper.unsent:
            self._post(keeper, b"")
        try:
            data, fds = receive(keeper.sock)
        except BlockingIOError:  # it was ready for writing
            return
        except ConnectionError:
            data, fds = b"", []
        keeper.fds += fds
        keeper.buffer += data
        nonsense = ""
        try:
            if self._take(keeper):
                return
        except BadFrame as what:  # the keeper then ends its rank, which nothing else could end
            nonsense, data = str(what), b""
        if not data:
            self._leave(keeper, nonsense)

    def _take(self, keeper: _Keeper) -> bool:
        """Takes what has arrived. True if the connection is another one's now."""
        for kind, rank, payload in unpack(keeper.buffer):
            if kind == frames.HOST and self.on_host is not None:
                key, *wish = payload.split(b"\0")
                if keeper.rank >= 0 or keeper.fds or not has_key(key, self.secret):
                    raise BadFrame("a host from a process without the job's key")
                if len(wish) < len(("host", "own", "shell", "command", "ssh")):
                    raise BadFrame("a host without a command")
                self.selector.unregister(keeper.sock)
                self.keepers.discard(keeper)
                self.on_host(keeper.sock, wish)
                return True
            check(kind, rank, payload, self.num_ranks)
            if keeper.rank not in (-1, rank):
                raise BadFrame(f"a message of rank {rank}")
            if kind == frames.RANK:
                if keeper.rank >= 0 or len(keeper.fds) > 3:
                    raise BadFrame("a second rank")
                self.sessions.add(payload.decode(errors="surrogateescape"))
                self._begin(keeper, rank)
            elif kind == frames.MPI_JOB:
                keeper.job = payload
                continue
            elif kind == frames.EXIT:
                self._drain(keeper)
            self.deliver(kind, rank, payload)
        return False

    def _leave(self, keeper: _Keeper, nonsense: str) -> None:
        self._drain(keeper)
        for fd in list(keeper.outputs):
            self._close(keeper, fd)
        for fd in keeper.fds:
            os.close(fd)
        self.selector.unregister(keeper.sock)
        keeper.sock.close()
        self.keepers.discard(keeper)
        # A keeper that was killed has not removed its MPI's files.
        if keeper.job:
            SharedFiles().remove(keeper.job)
        if keeper.rank >= 0:
            self.deliver(frames.KEEPER_GONE, keeper.rank, nonsense.encode())

    def _begin(self, keeper: _Keeper, rank: int) -> None:
        keeper.rank = rank
        if len(keeper.fds) < 2:  # the kernel drops those for which no number is left
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        for fd, stream in zip(keeper.fds, (frames.OUT, frames.ERR, frames.RESULT), strict=False):
            os.set_blocking(fd, False)
            keeper.outputs[fd] = stream
            if not self.paused:
                self._listen(keeper, fd)
        keeper.fds = []
        stdin = [self.stdin_of_rank_0()] if rank == 0 else []
        # A rank that starts while the job is being ended is never run.
        go = frame(frames.GO, payload=self.host_variables)
        if self.variables is not None:
            go = frame(frames.VARIABLES, payload=self.variables) + go
        self._post(keeper, (self.ending or b"") + go, stdin)
        for fd in stdin:
            os.close(fd)

    def _output(self, keeper: _Keeper, fd: int) -> int:
        """Passes one chunk on, and returns its size; 0 if there is none now."""
        if fd not in keeper.outputs:
            return 0
        try:
            data = os.read(fd, frames.CHUNK)
        except BlockingIOError:
            return 0
        if data:
            self.deliver(keeper.outputs[fd], keeper.rank, data)
        else:
            self._close(keeper, fd)
        return len(data)

    def _close(self, keeper: _Keeper, fd: int) -> None:
        with contextlib.suppress(KeyError):
            self.selector.unregister(fd)
        del keeper.outputs[fd]
        os.close(fd)

    def _drain(self, keeper: _Keeper) -> None:
        """Reads the output that is in the pipes of a rank that has ended. Its background processes
        may write on without an end: the event loop reads that later."""
        for fd in list(keeper.outputs):
            (left,) = frames.INT.unpack(fcntl.ioctl(fd, termios.FIONREAD, bytes(frames.INT.size)))
            while self.drains and left > 0 and (size := self._output(keeper, fd)):
                left -= size
