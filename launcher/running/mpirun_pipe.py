"""Reads what mpirun and its daemons print."""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable

from hvdrun.agent.frames import CHUNK


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
