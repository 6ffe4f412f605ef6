"""Signals that the hvdruns on other nodes have got, where each host runs one (see `rendezvous`)."""

from __future__ import annotations

import contextlib
import os
import struct
import threading

_SIGNAL = struct.Struct("ii")  # its number, and its node
_AT_ONCE = 1024


class NodeSignals:
    """Before `begin`, a node's signal is to this process as one of its own. From then on `read`
    gives it with the number of its node; `fd` is readable when there are some."""

    def __init__(self) -> None:
        self.fd, self._writer = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._writer, False)
        self._lock = threading.Lock()
        self._has_begun = False

    def begin(self) -> None:
        with self._lock:
            self._has_begun = True

    def add(self, number: int, node: int) -> None:
        """May be called in any thread."""
        with self._lock:
            if not self._has_begun:
                os.kill(os.getpid(), number)
                return
            with contextlib.suppress(BlockingIOError):  # thousands that nobody has read
                os.write(self._writer, _SIGNAL.pack(number, node))

    def read(self) -> list[tuple[int, int]]:
        try:
            data = os.read(self.fd, _AT_ONCE * _SIGNAL.size)
        except BlockingIOError:
            return []
        return list(_SIGNAL.iter_unpack(data))
