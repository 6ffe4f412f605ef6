"""Joins descriptors of this host with a connection to another one: what ssh does for a program's
input, output and errors. Nothing is read that can't be passed on, so a slow reader slows its writer
and fills no memory."""

from __future__ import annotations

import contextlib
import os
import selectors
from collections.abc import Callable, Mapping
from functools import partial

from hvdrun.rendezvous.sealed import SealedSocket

_CHUNK = 1 << 15
_FULL_BYTES = 1 << 18
_REST = 1 << 20  # the most that a pipe holds


class Source:
    """Gives what can be read from `fd` to `on_data`, b"" at its end. Closes it then."""

    def __init__(
        self, fd: int, selector: selectors.BaseSelector, on_data: Callable[[bytes], None]
    ) -> None:
        self.fd = fd
        self.selector = selector
        self.on_data = on_data
        self.ended = False
        self.wanted = False
        self.watched = False
        self.is_file = False
        self.is_reading = False
        if not os.isatty(fd):
            os.set_blocking(fd, False)

    def watch(self, wanted: bool) -> None:
        self.wanted = wanted
        if self.is_file:
            self._read_file()
        elif wanted and not (self.watched or self.ended):
            try:
                self.selector.register(self.fd, selectors.EVENT_READ, self.read)
                self.watched = True
            except PermissionError:  # a file, or /dev/null, which can always be read
                self.is_file = True
                self._read_file()
        elif self.watched and not wanted:
            self.selector.unregister(self.fd)
            self.watched = False

    def _read_file(self) -> None:
        """As long as it is wanted, which `on_data` may change."""
        if not self.is_reading:
            self.is_reading = True
            while self.wanted and not self.ended:
                self.read()
            self.is_reading = False

    def read(self) -> bool:
        """Reads once. False if nothing was there."""
        if self.ended:
            return False
        try:
            data = os.read(self.fd, _CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self.end()
        self.on_data(data)
        return bool(data)

    def end(self) -> None:
        if not self.ended:
            self.watch(False)
            self.ended = True
            os.close(self.fd)


class Sink:
    """Writes to `fd` as fast as its reader takes it; `on_change` is called after each write."""

    def __init__(
        self, fd: int, selector: selectors.BaseSelector, on_change: Callable[[], None]
    ) -> None:
        self.fd = fd
        self.selector = selector
        self.on_change = on_change
        self.waiting = bytearray()
        self.ends = False  # close it once all is written
        self.closed = False
        self.broken = False  # nobody reads any more
        self.watched = False
        if not os.isatty(fd):
            os.set_blocking(fd, False)

    @property
    def is_full(self) -> bool:
        return not self.closed and len(self.waiting) > _FULL_BYTES

    def give(self, data: bytes) -> None:
        """b"" is the end."""
        if self.closed:
            return
        self.ends = self.ends or not data
        self.waiting += data
        self._write()

    def _write(self) -> None:
        try:
            while self.waiting:
                del self.waiting[: os.write(self.fd, memoryview(self.waiting)[:_CHUNK])]
        except BlockingIOError:
            pass
        except OSError:
            self.waiting.clear()
            self.broken = True
        if self.broken or (self.ends and not self.waiting):
            self.close()
        elif bool(self.waiting) != self.watched:
            self.watched = bool(self.waiting)
            if self.watched:
                self.selector.register(self.fd, selectors.EVENT_WRITE, self._ready)
            else:
                self.selector.unregister(self.fd)

    def _ready(self) -> None:
        if not self.closed:
            self._write()
            self.on_change()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            if self.watched:
                with contextlib.suppress(KeyError):
                    self.selector.unregister(self.fd)
            os.close(self.fd)


class Relay:
    """The descriptors by the kinds of messages that stand for them on the connection."""

    def __init__(
        self,
        connection: SealedSocket,
        selector: selectors.BaseSelector,
        sources: Mapping[bytes, int],
        sinks: Mapping[bytes, int],
    ) -> None:
        self.connection = connection
        self.sources = {
            kind: Source(fd, selector, partial(self._send, kind)) for kind, fd in sources.items()
        }
        self.sinks = {kind: Sink(fd, selector, self.balance) for kind, fd in sinks.items()}
        connection.on_room = self.balance
        self.on_written: Callable[[], None] | None = None
        self.balance()

    def give(self, kind: bytes, payload: bytes) -> None:
        """A message of the connection for one of the sinks."""
        if kind in self.sinks:
            self.sinks[kind].give(payload)
            self.balance()

    def balance(self) -> None:
        """Reads from each side only what the other one can take."""
        if self.on_written is not None and all(sink.closed for sink in self.sinks.values()):
            done, self.on_written = self.on_written, None
            done()
        if self.connection.is_closed:
            return
        for source in self.sources.values():
            source.watch(not self.connection.is_full)
        self.connection.pause(any(sink.is_full for sink in self.sinks.values()))

    def read_rest(self) -> bool:
        """After the end of the program that writes to the sources: reads what is left there. False
        if the connection must take some of it first."""
        for source in self.sources.values():
            # A process that it has left behind may write on without end.
            for _ in range(_REST // _CHUNK):
                if self.connection.is_full or not source.read():
                    break
        return not self.connection.is_full

    def finish(self, on_written: Callable[[], None]) -> None:
        """No more comes for the sinks: calls `on_written` once they have taken all, or break."""
        self.on_written = on_written
        for sink in self.sinks.values():
            sink.give(b"")
        self.balance()

    def close_here(self) -> None:
        """Only the descriptors: what was sent may still be on its way."""
        for source in self.sources.values():
            source.end()
        for sink in self.sinks.values():
            sink.close()

    def close(self) -> None:
        self.close_here()
        self.connection.close()

    def _send(self, kind: bytes, data: bytes) -> None:
        self.connection.send(kind, data)
        self.balance()
