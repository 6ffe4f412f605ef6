"""Peers without MPI: ranks of one host, each with a socket to number 0.

Both ends have proved who they are (`on_host`), so objects are pickled. A frame is a header of
fixed size, with the number of the exchange, and the object. An exchange is lost as soon as one of
the processes ends, since the kernel closes its socket: number 0 then tells all others which one it
was.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from hvdlite.errors import LaunchError
from hvdlite.world.bootstrap import on_host

_HEADER = struct.Struct("!8sIIQ")  # magic, kind, number of the exchange, bytes that follow
_INT = struct.Struct("i")
_MAGIC = b"hvdlpeer"
_THING, _FAILURE, _DESCRIPTOR, _NO_DESCRIPTOR = range(4)
# Far more than any object that init or a process set exchanges.
_MOST_BYTES = 1 << 28
_CHUNK = 1 << 16
# The others wait a little longer than number 0, which knows whom all are waiting for.
_LONGER_S = 2.0

_open: weakref.WeakSet[HostPeers] = weakref.WeakSet()


class HostPeers:
    """Implements `peers.Peers`. Its methods are called by one thread at a time."""

    comm = None
    passes_descriptors = True
    any_thread = True

    def __init__(
        self,
        rank: int,
        world_ranks: Sequence[int],
        sockets: Mapping[int, socket.socket],
        secret: bytes,
        timeout_s: float,
    ) -> None:
        """sockets: of number 0 to all others, or the one to number 0; they are closed by `free`.

        world_ranks: by number, what texts call them.
        secret: known to these processes alone.
        timeout_s: how long an exchange waits for the others.
        """
        self.rank = rank
        self.size = len(world_ranks)
        self._world_ranks = tuple(world_ranks)
        self._sockets = dict(sockets)
        self._secret = secret
        self._timeout_s = timeout_s
        self._exchanges = 0
        self._duplicates = 0
        self._lost: str | None = None
        self._using = threading.Lock()
        for sock in self._sockets.values():
            sock.setblocking(False)
        _open.add(self)

    def with_secret(self, secret: bytes) -> HostPeers:
        """The same, once they know a secret."""
        self._secret = secret
        return self

    # ---- exchanges ----

    def allgather(self, thing: Any) -> list[Any]:
        """As of `Peers`.

        Raises:
            LaunchError: A process has ended, or did not come in time.
        """
        with self._exchange() as deadline:
            if self.rank:
                self._send(0, _THING, pickle.dumps(thing), deadline)
                return list(pickle.loads(self._receive(deadline, _THING)[0]))
            things = self._receive_from_all(deadline)
            things[0] = pickle.dumps(thing)
            all_things = [pickle.loads(things[number]) for number in range(self.size)]
            answer = pickle.dumps(all_things)
            for number in self._sockets:
                self._send(number, _THING, answer, deadline)
            return all_things

    def bcast(self, thing: Any, root: int = 0) -> Any:
        return self.allgather(thing if self.rank == root else None)[root]

    def pass_descriptor(self, descriptor: int) -> int:
        with self._exchange() as deadline:
            if self.rank == 0:
                kind = _DESCRIPTOR if descriptor >= 0 else _NO_DESCRIPTOR
                for number in self._sockets:
                    self._send(number, kind, b"", deadline, descriptor)
                return descriptor
            return self._receive(deadline, _DESCRIPTOR, _NO_DESCRIPTOR)[1]

    def host_leader(self) -> int:
        return 0

    # ---- parts ----

    def part(self, ranks: Sequence[int], key: str = "", timeout_s: float = 0.0) -> HostPeers:
        """As of `Peers`; timeout_s: how long it waits for the others, 0: as these do."""
        timeout_s = timeout_s or self._timeout_s
        numbers = ",".join(map(str, ranks)).encode()
        secret = on_host.derived(self._secret, b"part", key.encode(), numbers)
        name = on_host.derived(secret, b"name")[: on_host.NAME_BYTES]
        token = on_host.derived(secret, b"token")
        world_ranks = [self._world_ranks[rank] for rank in ranks]
        own = list(ranks).index(self.rank)
        sockets = on_host.meet(
            *(name, token, own, len(ranks), timeout_s),
            naming=lambda number: f"rank {world_ranks[number]}",
            tell=tell_failure,
        )
        return HostPeers(own, world_ranks, sockets, secret, timeout_s)

    def split(self, color: int) -> HostPeers:
        colors = self.allgather(color)
        self._duplicates += 1
        ranks = [rank for rank, its in enumerate(colors) if its == color]
        return self.part(ranks, f"split {self._duplicates}")

    def duplicate(self) -> HostPeers:
        self._duplicates += 1
        return self.part(range(self.size), f"duplicate {self._duplicates}")

    def wire(self) -> None:
        return None

    def version(self) -> str:
        return "hvdlite without MPI"

    # ---- the end ----

    def free(self) -> None:
        for sock in self._sockets.values():
            sock.close()
        self._sockets = {}
        self._lost = self._lost or "these ranks have parted"

    def free_together(self) -> None:
        self.free()

    def retire(self, label: str = "") -> None:
        self.free()

    # ---- frames ----

    @contextlib.contextmanager
    def _exchange(self) -> Any:
        """Yields the deadline. A failure is told to all, and stays."""
        with self._using:
            if self._lost is not None:
                raise LaunchError(self._lost)
            self._exchanges += 1
            longer_s = _LONGER_S if self.rank else 0.0
            try:
                yield time.monotonic() + self._timeout_s + longer_s
            except BaseException as error:
                self._lost = str(error) or type(error).__name__
                if self.rank == 0:
                    for sock in self._sockets.values():
                        tell_failure(sock, self._lost)
                self.free()
                raise

    def _send(
        self, number: int, kind: int, data: bytes, deadline: float, descriptor: int = -1
    ) -> None:
        sock = self._sockets[number]
        if len(data) > _MOST_BYTES:
            raise LaunchError(f"rank {self._world_ranks[self.rank]} sends {len(data)} bytes")
        rest = memoryview(_HEADER.pack(_MAGIC, kind, self._exchanges, len(data)) + data)
        try:
            while rest:
                try:
                    if descriptor >= 0:
                        passed = (socket.SOL_SOCKET, socket.SCM_RIGHTS, _INT.pack(descriptor))
                        sent = sock.sendmsg([rest], [passed], socket.MSG_NOSIGNAL)
                        descriptor = -1
                    else:
                        sent = sock.send(rest, socket.MSG_NOSIGNAL)
                    rest = rest[sent:]
                except BlockingIOError:
                    self._wait({number: sock}, selectors.EVENT_WRITE, deadline)
        except (BrokenPipeError, ConnectionError) as error:
            # It may have said why before it hung up.
            if self.rank:
                self._receive(deadline, _THING, _DESCRIPTOR, _NO_DESCRIPTOR)
            raise LaunchError(self._has_ended(number)) from error

    def _receive(self, deadline: float, *kinds: int) -> tuple[bytes, int]:
        """The data and descriptor of number 0's next frame, which has one of these kinds."""
        incoming = _Incoming(self._sockets[0], self._exchanges, kinds)
        while (arrived := incoming.read()) is None:
            self._wait({0: self._sockets[0]}, selectors.EVENT_READ, deadline)
        if not arrived:
            raise LaunchError(incoming.problem or self._has_ended(0))
        if incoming.kind == _FAILURE:
            raise LaunchError(bytes(incoming.data).decode(errors="replace"))
        return bytes(incoming.data), incoming.descriptor

    def _receive_from_all(self, deadline: float) -> dict[int, bytes]:
        waiting = {
            number: _Incoming(sock, self._exchanges, (_THING,))
            for number, sock in self._sockets.items()
        }
        things: dict[int, bytes] = {}
        while waiting:
            for number, incoming in list(waiting.items()):
                arrived = incoming.read()
                if arrived is False:
                    raise LaunchError(incoming.problem or self._has_ended(number))
                if arrived:
                    things[number] = bytes(incoming.data)
                    del waiting[number]
            if waiting:
                self._wait(
                    {number: self._sockets[number] for number in waiting},
                    selectors.EVENT_READ,
                    deadline,
                )
        return things

    def _wait(self, sockets: Mapping[int, socket.socket], event: int, deadline: float) -> None:
        """Until one of these is ready."""
        with selectors.DefaultSelector() as selector:
            for sock in sockets.values():
                selector.register(sock, event)
            left_s = deadline - time.monotonic()
            if left_s > 0 and selector.select(left_s):
                return
            if left_s > 0 and time.monotonic() < deadline:
                return
        who = ", ".join(f"rank {self._world_ranks[number]}" for number in list(sockets)[:16])
        raise LaunchError(f"{who} did not come within {self._timeout_s:g} s")

    def _has_ended(self, number: int) -> str:
        return (
            f"rank {self._world_ranks[number]} has ended, or given up, while others waited for it"
        )


def tell_failure(sock: socket.socket, text: str) -> None:
    """Says to the process at the other end why all that it waits for has failed."""
    data = text.encode()[:_CHUNK]
    with contextlib.suppress(OSError):
        sock.send(_HEADER.pack(_MAGIC, _FAILURE, 0, len(data)) + data, socket.MSG_NOSIGNAL)


class _Incoming:
    """A frame that arrives in pieces. Its header is checked before memory is taken for the rest."""

    def __init__(self, sock: socket.socket, exchange: int, kinds: Sequence[int]) -> None:
        self._sock = sock
        self._exchange = exchange
        self._kinds = kinds
        self._header = b""
        self.kind = -1
        self.data = bytearray()
        self._size = 0
        self.descriptor = -1
        self.problem = ""

    def read(self) -> bool | None:
        """Takes what has arrived. True: it is complete; None: not yet; False: the other end has
        hung up, or sends something else."""
        while True:
            try:
                if len(self._header) < _HEADER.size:
                    data = self._read_header()
                else:
                    data = self._sock.recv(min(_CHUNK, self._size - len(self.data)))
                    self.data += data
            except BlockingIOError:
                return None
            except OSError:
                data = b""
            if not data or self.problem:
                self._close_descriptor()
                return False
            if len(self._header) == _HEADER.size and len(self.data) == self._size:
                return True

    def _read_header(self) -> bytes:
        room = _HEADER.size - len(self._header)
        # Not `socket.recv_fds`, which ignores flags.
        data, more, flags, _ = self._sock.recvmsg(
            room, socket.CMSG_LEN(_INT.size), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, value in more:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                for (descriptor,) in _INT.iter_unpack(value[: len(value) // _INT.size * _INT.size]):
                    self._close_descriptor()
                    self.descriptor = descriptor
        self._header += data
        if len(self._header) == _HEADER.size:
            magic, self.kind, exchange, self._size = _HEADER.unpack(self._header)
            fits = (self.kind == _DESCRIPTOR) == (self.descriptor >= 0)
            if magic != _MAGIC or self._size > _MOST_BYTES or flags & socket.MSG_CTRUNC or not fits:
                self.problem = "a rank sent something else than a frame of hvdlite"
            elif self.kind == _FAILURE:
                pass
            elif exchange != self._exchange:
                self.problem = (
                    f"ranks are out of step: exchange {exchange} where {self._exchange} is due"
                )
            elif self.kind not in self._kinds:
                self.problem = (
                    f"ranks are out of step: in exchange {exchange} they do different things"
                )
        return data

    def _close_descriptor(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _after_fork_in_child() -> None:
    """Else the others would not notice the end of this process's parent."""
    for peers in list(_open):
        peers.free()


os.register_at_fork(after_in_child=_after_fork_in_child)
