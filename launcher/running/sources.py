"""What the loop reads besides ranks and hosts: mpirun's output, hvdrun's standard input for rank 0,
and signals that the hvdruns on other nodes have got (see `rendezvous`)."""

from __future__ import annotations

import contextlib
import os
import selectors
import struct
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from hvdrun.agent.frames import CHUNK, STDIN

if TYPE_CHECKING:  # it is loaded for the first other host
    from hvdrun.running.host_link import HostLink

_SIGNAL = struct.Struct("ii")  # its number, and its node
_AT_ONCE = 1024


class Source:
    """The pipe that mpirun writes to. `heard` gets the data, `ended` is called at its end."""

    def __init__(
        self,
        fd: int,
        selector: selectors.BaseSelector,
        heard: Callable[[bytes], None],
        ended: Callable[[], None],
    ) -> None:
        self.fd = fd
        self.selector = selector
        self.heard = heard
        self.ended = ended
        self.is_open = True
        self.paused = False
        selector.register(fd, selectors.EVENT_READ, self._read)

    def pause(self, paused: bool) -> None:
        """Stops or resumes reading mpirun's output."""
        if paused == self.paused or not self.is_open:
            return
        self.paused = paused
        if paused:
            self.selector.unregister(self.fd)
        else:
            self.selector.register(self.fd, selectors.EVENT_READ, self._read)

    def _read(self) -> None:
        data = os.read(self.fd, CHUNK)
        if data:
            self.heard(data)
        else:
            self.is_open = False
            self.selector.unregister(self.fd)
            os.close(self.fd)
            self.ended()


class Stdin:
    """If rank 0 is on this host, it inherits the file itself. To another host the input is sent in
    pieces, each after rank 0 has taken the one before; nothing is read before rank 0 starts.
    is_taken: what is typed is for hvdrun itself, and rank 0's input is empty."""

    def __init__(self, selector: selectors.BaseSelector, is_taken: bool = False) -> None:
        self.selector = selector
        self.is_taken = is_taken
        self.link: HostLink | None = None

    def for_local_rank(self) -> int:
        if self._usable():
            with contextlib.suppress(OSError):  # standard input may be closed
                return os.dup(0)
        return os.open(os.devnull, os.O_RDONLY)

    def wanted_by(self, link: HostLink) -> None:
        self.link = link
        if not self._usable():
            link.send(STDIN)
            return
        try:
            self.selector.register(0, selectors.EVENT_READ, self._read)
        except (PermissionError, KeyError):  # a plain file, which is always ready
            self._read()

    def _read(self) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(0)
        try:
            data = os.read(0, CHUNK)
        except OSError:
            data = b""
        if self.link is not None:
            self.link.send(STDIN, data)

    def _usable(self) -> bool:
        """False if it is taken, or if hvdrun runs in the background: reading from the terminal
        would stop it."""
        if self.is_taken:
            return False
        try:
            return not os.isatty(0) or os.tcgetpgrp(0) == os.getpgrp()
        except OSError:  # a terminal, but not this session's
            return True


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
