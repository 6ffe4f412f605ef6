"""How processes of one host meet without MPI, over a socket that no other user can use.

One of them, number 0, listens on an abstract AF_UNIX socket; the others connect. All know a token.
Everybody on the host can read the socket's name and connect to it, so both ends check

- the user at the other end (SO_PEERCRED): this one, or root;
- that it knows the token: each sends a fresh nonce, and gets a MAC over both. So a process of
  another job of the same user is not taken for a member.

A peer that connects and says nothing does not hold up the others.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable

from hvdlite.errors import LaunchError
from hvdrun.for_hvdlite import is_trusted, user_of

TOKEN_BYTES = 32
NAME_BYTES = 16
_NONCE_BYTES = 32
_MAC_BYTES = 32
_MAGIC = b"hvdlmeet"

# Listener to caller; its answer: number, how many there are; the listener's proof.
_HELLO = struct.Struct(f"!8s{_NONCE_BYTES}s")
_ANSWER = struct.Struct(f"!8sII{_NONCE_BYTES}s{_MAC_BYTES}s")
_PROOF = struct.Struct(f"!8s{_MAC_BYTES}s")

# Callers that have not proved yet who they are; the oldest is dropped for another one.
_MOST_UNPROVEN = 256
FIRST_PAUSE_S = 0.001
LONGEST_PAUSE_S = 0.05


class Refused(Exception):
    """Nobody listens there, in this network namespace."""


class UnauthenticatedPeer(Exception):
    """Another user listens there."""


def address(name: bytes) -> bytes:
    return b"\0hvdlite-" + name.hex().encode()


def derived(token: bytes, *words: bytes) -> bytes:
    """A token that follows from another one and from words; nothing can be learned from it."""
    text = b"".join(len(word).to_bytes(8, "big") + word for word in words)
    return hmac.digest(token, text, "sha256")


def pauses() -> Iterable[float]:
    """Growing times to sleep between two looks."""
    pause_s = FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(1.5 * pause_s, LONGEST_PAUSE_S)


def listen(name: bytes) -> socket.socket:
    """Raises LaunchError: the name is taken."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(address(name))
        listener.listen(4096)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise LaunchError(
                "the socket on which these ranks meet exists already: two groups of the same ranks "
                "are made at once under one key"
            ) from error
        raise
    return listener


def _mac(token: bytes, role: bytes, number: int, size: int, *nonces: bytes) -> bytes:
    return derived(token, role, number.to_bytes(4, "big"), size.to_bytes(4, "big"), *nonces)


class Reception:
    """Number 0's part: lets the others in. `met` has their sockets by number."""

    def __init__(
        self, listener: socket.socket, token: bytes, size: int, naming: Callable[[int], str]
    ) -> None:
        """listener: closed by `close`. naming: what texts call a number."""
        self._naming = naming
        self.met: dict[int, socket.socket] = {}
        self._listener = listener
        self._token = token
        self._size = size
        # By descriptor: the nonce that was sent, and what has come so far.
        self._unproven: dict[int, tuple[socket.socket, bytes, bytearray]] = {}
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)

    def missing(self) -> list[int]:
        return [number for number in range(1, self._size) if number not in self.met]

    def turn(self, timeout_s: float) -> None:
        """Serves those that call, for at most about this long.

        Raises:
            LaunchError: A member has ended, or two processes have one number.
        """
        for descriptor, _ in self._poll.poll(max(0.0, timeout_s) * 1000):
            if descriptor == self._listener.fileno():
                self._accept()
            elif descriptor in self._unproven:
                self._hear(descriptor)
            else:  # of members only their end is reported
                number = next(n for n, sock in self.met.items() if sock.fileno() == descriptor)
                raise LaunchError(
                    f"{self._naming(number)} has ended, or given up, while others were awaited"
                )

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        if not is_trusted(sock):
            sock.close()
            return
        sock.setblocking(False)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        if len(self._unproven) >= _MOST_UNPROVEN:
            self._drop(next(iter(self._unproven)))
        self._poll.register(sock, select.POLLIN)
        self._unproven[sock.fileno()] = sock, nonce, bytearray()
        with contextlib.suppress(OSError):  # then it has hung up, which is heard next
            sock.send(_HELLO.pack(_MAGIC, nonce), socket.MSG_NOSIGNAL)

    def _hear(self, descriptor: int) -> None:
        sock, nonce, heard = self._unproven[descriptor]
        try:
            data = sock.recv(_ANSWER.size - len(heard))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        heard += data
        if not data:
            self._drop(descriptor)
        elif len(heard) == _ANSWER.size:
            self._judge(sock, nonce, bytes(heard))

    def _judge(self, sock: socket.socket, nonce: bytes, answer: bytes) -> None:
        magic, number, size, its_nonce, mac = _ANSWER.unpack(answer)
        right = _mac(self._token, b"caller", number, size, nonce, its_nonce)
        if magic != _MAGIC or not hmac.compare_digest(mac, right):
            self._drop(sock.fileno())
            return
        del self._unproven[sock.fileno()]
        self._poll.register(sock, 0)
        if size != self._size or not 0 < number < self._size:
            sock.close()
            raise LaunchError(
                f"a process is rank {number} of {size}, but rank 0 is one of {self._size}; give "
                "every process a rank of its own and the same size"
            )
        if number in self.met:
            sock.close()
            raise LaunchError(
                f"two processes are rank {number} of {size}; give every process a rank of its own"
            )
        self.met[number] = sock
        proof = _mac(self._token, b"listener", number, size, its_nonce, nonce)
        with contextlib.suppress(OSError):
            sock.send(_PROOF.pack(_MAGIC, proof), socket.MSG_NOSIGNAL)

    def _drop(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        self._unproven.pop(descriptor)[0].close()

    def close(self) -> None:
        """Ends the reception; the sockets of `met` stay open, and are the caller's."""
        for sock, _, _ in self._unproven.values():
            sock.close()
        self._listener.close()


def call(name: bytes, token: bytes, number: int, size: int, deadline: float) -> socket.socket:
    """The part of those that are not number 0: a socket to it, in blocking mode.

    Raises:
        Refused: Nobody listens there.
        UnauthenticatedPeer: Another user does.
        ConnectionError: It hung up, or is not of this job.
        TimeoutError: It did not answer before the deadline (of `time.monotonic`).
    """
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(_left(deadline))
        try:
            sock.connect(address(name))
        except (ConnectionRefusedError, FileNotFoundError) as error:
            raise Refused from error
        if not is_trusted(sock):
            raise UnauthenticatedPeer(f"a process of user {user_of(sock)} listens there")
        magic, nonce = _HELLO.unpack(_exactly(sock, _HELLO.size, deadline))
        own = secrets.token_bytes(_NONCE_BYTES)
        mac = _mac(token, b"caller", number, size, nonce, own)
        sock.sendall(_ANSWER.pack(_MAGIC, number, size, own, mac))
        its_magic, proof = _PROOF.unpack(_exactly(sock, _PROOF.size, deadline))
        right = _mac(token, b"listener", number, size, own, nonce)
        if (magic, its_magic) != (_MAGIC, _MAGIC) or not hmac.compare_digest(proof, right):
            raise ConnectionAbortedError("the process that listens there is not of this job")
        sock.settimeout(None)
    except BlockingIOError as error:  # its queue is full
        sock.close()
        raise TimeoutError("it accepts no connections") from error
    except BaseException:
        sock.close()
        raise
    return sock


def _exactly(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        sock.settimeout(_left(deadline))
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionResetError("rank 0 hung up")
        data += more
    return data


def _left(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the time is over")
    return left_s


def meet(
    name: bytes,
    token: bytes,
    number: int,
    size: int,
    timeout_s: float,
    naming: Callable[[int], str],
    tell: Callable[[socket.socket, str], None],
) -> dict[int, socket.socket]:
    """Members that know each other meet: number 0's sockets to all others, or the one to number 0.

    naming: what texts call a number. tell: says to one that has come why bootstrap has failed.

    Raises:
        LaunchError: They did not all come in time, or one failed.
    """
    deadline = time.monotonic() + timeout_s
    if number:
        try:
            return {0: _reach(name, token, number, size, deadline)}
        except (TimeoutError, Refused) as error:
            raise LaunchError(f"{naming(0)} did not come within {timeout_s:g} s") from error
        except (UnauthenticatedPeer, OSError) as error:
            raise LaunchError(f"bootstrap {naming(0)}: {error}") from error
    if size == 1:
        return {}
    reception = Reception(listen(name), token, size, naming)
    try:
        while missing := reception.missing():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise LaunchError(f"{listed(missing, naming)} did not come within {timeout_s:g} s")
            reception.turn(left_s)
    except BaseException as error:
        for sock in reception.met.values():
            tell(sock, str(error) or type(error).__name__)
            sock.close()
        raise
    finally:
        reception.close()
    return reception.met


def listed(numbers: Iterable[int], naming: Callable[[int], str]) -> str:
    """The first of them, in words."""
    names = [naming(number) for number in numbers]
    return ", ".join(names[:16]) + f" and {len(names) - 16} others" * (len(names) > 16)


def _reach(name: bytes, token: bytes, number: int, size: int, deadline: float) -> socket.socket:
    for pause_s in pauses():
        try:
            return call(name, token, number, size, deadline)
        except (Refused, TimeoutError):  # it does not listen yet, or its queue is full
            if time.monotonic() + pause_s > deadline:
                raise
        time.sleep(pause_s)
    raise AssertionError
