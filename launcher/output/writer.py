"""Writes all output, to the terminal and to files, in a thread of its own.

Otherwise a reader that stops reading (`hvdrun … | less`, Ctrl-S, a file server) would block the
loop that sends and receives signs of life, and hvdrun would give up the hosts.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable

from hvdrun.errors import OutputLost

Sink = Callable[[bytes], None]  # writes one piece, and may block

# With more than the first waiting to be written, the ranks' output waits in their pipes, until less
# than the second is left.
FULL_BYTES, ROOM_BYTES = 8 << 20, 2 << 20
PIECE_BYTES = 1 << 18  # small ones are joined up to this size


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # another program on the terminal may have made it non-blocking
            select.select([], [fd], [])


class Writer:
    """`write` returns at once. `awake` becomes readable when there is room again."""

    def __init__(self) -> None:
        self.awake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._queue: list[tuple[Sink, bytes]] = []
        self._backlog_bytes = 0
        self._was_full = False
        self._broken: OSError | None = None
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def write(self, sink: Sink, data: bytes) -> None:
        """Raises BrokenPipeError if an earlier piece could not be written."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
            self._thread.start()
        with self._changed:
            if self._broken is not None:
                raise BrokenPipeError from self._broken
            self._queue.append((sink, data))
            self._backlog_bytes += len(data)
            self._changed.notify()

    def is_full(self) -> bool:
        """Whether no more should be read for now."""
        with self._changed:
            if self._broken is not None:
                raise BrokenPipeError from self._broken
            limit = ROOM_BYTES if self._was_full else FULL_BYTES
            self._was_full = self._backlog_bytes > limit
            return self._was_full

    def is_idle(self) -> bool:
        """Whether all is written."""
        with self._changed:
            return not self._backlog_bytes

    def check(self) -> None:
        """Raises OutputLost if writing failed, except because the reader is gone."""
        if self._broken is not None and not isinstance(self._broken, BrokenPipeError):
            raise OutputLost(f"the ranks' output can't be written: {self._broken.strerror}")

    def heard(self) -> None:
        """Makes `awake` unreadable again."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.awake)

    def drain(self, until: float) -> bool:
        """Waits until all is written. False if `until`, on the monotonic clock, comes first."""
        with self._changed:
            while self._backlog_bytes and self._broken is None:
                left = until - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    self._changed.wait()
                queue, self._queue = self._queue, []
            for sink, data in joined(queue):
                try:
                    sink(data)
                except OSError as error:
                    with self._changed:
                        self._broken = error
                        self._changed.notify_all()
                    os.eventfd_write(self.awake, 1)
                    return
                with self._changed:
                    self._backlog_bytes -= len(data)
                    if self._was_full and self._backlog_bytes <= ROOM_BYTES:
                        os.eventfd_write(self.awake, 1)
                    if not self._backlog_bytes:
                        self._changed.notify_all()


def joined(queue: list[tuple[Sink, bytes]]) -> list[tuple[Sink, bytes]]:
    """The queue with small neighbours for one sink joined, to save system calls."""
    groups: list[tuple[Sink, list[bytes]]] = []
    size = 0
    for sink, data in queue:
        size += len(data)
        if groups and groups[-1][0] is sink and size <= PIECE_BYTES:
            groups[-1][1].append(data)
        else:
            groups.append((sink, [data]))
            size = len(data)
    return [(sink, b"".join(parts) if len(parts) > 1 else parts[0]) for sink, parts in groups]
