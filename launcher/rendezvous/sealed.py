"""A connection between two nodes: a handshake (see `noise`), then frames (see `agent.frames`) that
only the two ends can read, change or make.

On the wire: 48 bytes each way, then records, each with its length in two bytes. Decrypted and
joined, they are the frames.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import time
from collections.abc import Callable

from hvdrun.agent.frames import BadFrame, frame, unpack
from hvdrun.rendezvous.noise import (
    HANDSHAKE_BYTES,
    MESSAGE_BYTES,
    TAG_BYTES,
    Cipher,
    Handshake,
    NotProved,
)

_LENGTH = struct.Struct("!H")
_PART_BYTES = MESSAGE_BYTES - TAG_BYTES
_CHUNK = 1 << 16
FULL_BYTES = 1 << 18  # what waits to be sent, above which nothing more should be given

NOT_PROVED = "it did not prove the secret"
CLOSED_EARLY = "it closed the connection before it proved the secret"


class SealedSocket:
    """`on_message(self, kind, payload)` is called for each message, `on_end(self, why)` once, when
    the connection has ended by itself: why is "" after an orderly end. Both may close the
    connection, and `on_message` may raise BadFrame, which ends it.

    `is_proved`: the other end has the key. No message comes before that. A caller's `on_proved` is
    called then, before what `send` was given is sent.
    """

    def __init__(
        self,
        sock: socket.socket,
        key: bytes,
        selector: selectors.BaseSelector,
        on_message: Callable[[SealedSocket, bytes, bytes], None],
        on_end: Callable[[SealedSocket, str], None],
        is_caller: bool,
    ) -> None:
        self.sock = sock
        self.on_message = on_message
        self.on_end = on_end
        self.on_room: Callable[[], None] | None = (
            None  # called when `is_full` may have become false
        )
        self.on_proved: Callable[[], None] | None = None
        self.is_caller = is_caller
        self.is_proved = False
        self.is_closed = False
        self.paused = False
        self._selector = selector
        self._handshake = Handshake(key)
        self._ciphers: tuple[Cipher, Cipher] | None = None  # sending, receiving
        self._buffer = bytearray()
        self._frames = bytearray()
        self._unsent = bytearray(self._handshake.first() if is_caller else b"")
        self._early: list[tuple[bytes, bytes]] = []  # messages from before the handshake's end
        self._interest = selectors.EVENT_READ
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        selector.register(sock, self._interest, self._ready)
        self._flush()

    @property
    def is_full(self) -> bool:
        return len(self._unsent) > FULL_BYTES

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        if self.is_closed:
            return
        if self._ciphers is None:
            self._early.append((kind, payload))
            return
        message = frame(kind, payload=payload)
        for begin in range(0, len(message), _PART_BYTES):
            sealed = self._ciphers[0].encrypt(message[begin : begin + _PART_BYTES])
            self._unsent += _LENGTH.pack(len(sealed)) + sealed
        self._flush()

    def pause(self, paused: bool) -> None:
        """Stops or resumes reading."""
        if paused != self.paused:
            self.paused = paused
            self._watch()

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            if self._interest:
                self._selector.unregister(self.sock)
            self.sock.close()

    def _end(self, why: str) -> None:
        if not self.is_closed:
            self.close()
            self.on_end(self, why)

    # ------------------------------------------------------------- input, output

    def _ready(self) -> None:
        if self._unsent:
            self._flush()
        if not self.is_closed and not self.paused:
            self._read()

    def _flush(self) -> None:
        was_full = self.is_full
        try:
            while self._unsent:
                del self._unsent[: self.sock.send(memoryview(self._unsent)[: 4 * _CHUNK])]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()  # the reading side notices
        self._watch()
        if was_full and not self.is_full and self.on_room is not None:
            self.on_room()

    def _watch(self) -> None:
        if self.is_closed:
            return
        wanted = 0 if self.paused else selectors.EVENT_READ
        wanted |= selectors.EVENT_WRITE if self._unsent else 0
        if wanted == self._interest:
            return
        if not self._interest:
            self._selector.register(self.sock, wanted, self._ready)
        elif not wanted:
            self._selector.unregister(self.sock)
        else:
            self._selector.modify(self.sock, wanted, self._ready)
        self._interest = wanted

    def _read(self) -> None:
        try:
            data = self.sock.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(error.strerror or str(error))
            return
        if not data:
            self._end("" if self.is_proved else CLOSED_EARLY)
            return
        self._buffer += data
        try:
            self._shake_hands()
            self._open_records()
        except NotProved:
            self._end(NOT_PROVED)
        except BadFrame as error:
            self._end(f"it speaks another language ({error})")

    def _shake_hands(self) -> None:
        if self._ciphers is not None or len(self._buffer) < HANDSHAKE_BYTES:
            return
        message = bytes(self._buffer[:HANDSHAKE_BYTES])
        del self._buffer[:HANDSHAKE_BYTES]
        if self.is_caller:
            self._ciphers = self._handshake.hear_second(message)
            self.is_proved = True
        else:
            answer, self._ciphers = self._handshake.answer_first(message)
            self._unsent += answer
        if self.is_caller and self.on_proved is not None:
            self.on_proved()
        early, self._early = self._early, []
        self._flush()
        for kind, payload in early:
            self.send(kind, payload)

    def _open_records(self) -> None:
        while self._ciphers and not self.is_closed and len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            record = self._ciphers[1].decrypt(bytes(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]
            self.is_proved = True
            self._frames += record
            for kind, _, payload in unpack(self._frames):
                if not self.is_closed:
                    self.on_message(self, kind, payload)

    def drain(self, limit_s: float) -> None:
        """Sends what is left, says that no more follows, and waits until the other end has taken
        it: a connection that is closed while something unread lies in it takes back what was sent.
        Blocks for so long at most."""
        until = time.monotonic() + limit_s
        with contextlib.suppress(OSError):
            self.sock.settimeout(limit_s)
            self.sock.sendall(self._unsent)
            self.sock.shutdown(socket.SHUT_WR)
            while (left_s := until - time.monotonic()) > 0:
                self.sock.settimeout(left_s)
                if not self.sock.recv(_CHUNK):
                    break
        self._unsent.clear()
