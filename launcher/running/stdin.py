"""Passes hvdrun's standard input to rank 0."""

from __future__ import annotations

import contextlib
import os
import selectors
from typing import TYPE_CHECKING

from hvdrun.agent.frames import CHUNK, STDIN

if TYPE_CHECKING:  # it is loaded for the first other host
    from hvdrun.running.host_link import HostLink


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
