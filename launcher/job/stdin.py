"""hvdrun's standard input, which is rank 0's."""

from __future__ import annotations

import contextlib
import os
import selectors

from hvdrun.agent.frames import CHUNK, STDIN
from hvdrun.job.host_link import HostLink


class Stdin:
    """A rank 0 of this host gets the very file. To another host it is sent piece by piece, each
    when the one before has been taken, and nothing is read before rank 0 is there."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self.selector = selector
        self.link: HostLink | None = None

    def for_local_rank(self) -> int:
        if self._usable():
            with contextlib.suppress(OSError):  # it may be closed
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

    @staticmethod
    def _usable() -> bool:
        """In the background, reading from the terminal would stop hvdrun."""
        try:
            return not os.isatty(0) or os.tcgetpgrp(0) == os.getpgrp()
        except OSError:  # a terminal, but not ours
            return True
