"""What mpirun and its daemons say, line by line."""

from __future__ import annotations

import os
import selectors
import time
from dataclasses import dataclass, field

from hvdrun.agent.frames import CHUNK

# Open MPI says it where the child was faster than the parent, and goes on; srun where it is told to
# bind nothing and can't bind.
MEANINGLESS = (
    b"plm:ssh: Warning: setpgid",
    b"plm:rsh: Warning: setpgid",
    b"lacks support for cpu binding",
)
# Open MPI's words where a machine under load did not start a thread of it in time.
ILL_LUCK = "listener thread failed to start"
LINE_BYTES = 1 << 16  # of a longer line the pieces are lines


@dataclass
class Noise:
    """Of both of its outputs; `take` gives what is to be shown, and each line once."""

    lines: list[tuple[float, str]] = field(default_factory=list)
    rest: bytearray = field(default_factory=bytearray)
    all: list[str] = field(default_factory=list)

    def feed(self, data: bytes, now: float) -> None:
        *lines, rest = data.replace(b"\0", b"").split(b"\n")
        if lines:
            lines[0] = bytes(self.rest) + lines[0]
            self.rest.clear()
        self.rest += rest
        if len(self.rest) > LINE_BYTES:
            lines.append(bytes(self.rest))
            self.rest.clear()
        self.lines += [
            (now, line.decode(errors="replace").rstrip())
            for line in lines
            if not any(part in line for part in MEANINGLESS)
        ]

    def take(self, until: float) -> list[str]:
        ready = [line for at, line in self.lines if at <= until]
        self.lines = [(at, line) for at, line in self.lines if at > until]
        self.all = (self.all + ready)[-200:]
        return ready

    def everything(self) -> list[str]:
        return self.all + [line for _, line in self.lines]

    def is_of_ill_luck(self) -> bool:
        """Whether mpirun or a daemon of it failed of what does not happen every time."""
        return any(ILL_LUCK in line for line in self.everything())


class Source:
    """The pipe that mpirun writes to; what comes goes to `noise`."""

    def __init__(self, fd: int, selector: selectors.BaseSelector, noise: Noise) -> None:
        self.fd = fd
        self.selector = selector
        self.noise = noise
        self.is_open = True
        self.paused = False
        selector.register(fd, selectors.EVENT_READ, self._read)

    def pause(self, paused: bool) -> None:
        """Whether what it has to say is left waiting for now."""
        if paused == self.paused or not self.is_open:
            return
        self.paused = paused
        if paused:
            self.selector.unregister(self.fd)
        else:
            self.selector.register(self.fd, selectors.EVENT_READ, self._read)

    def _read(self) -> None:
        data = os.read(self.fd, CHUNK)
        self.noise.feed(data or b"\n", time.monotonic())
        if not data:
            self.is_open = False
            self.selector.unregister(self.fd)
            os.close(self.fd)
