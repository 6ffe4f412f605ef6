"""The terminal that hvdrun was started from, and its settings."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import termios
from collections.abc import Mapping
from typing import Any


def terminals() -> frozenset[int]:
    """Which of stdout and stderr are terminals."""
    return frozenset(fd for fd in (1, 2) if os.isatty(fd))


def open_standard_files() -> None:
    """Opens those of 0, 1 and 2 that the caller has closed, as some daemons do: else the next
    opened file would get such a number, and output would be written to it."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)


def is_coloured(environ: Mapping[str, str]) -> bool:
    """Whether the user wants colours on a terminal, by https://no-color.org."""
    return not environ.get("NO_COLOR") and environ.get("TERM", "dumb") != "dumb"


class Terminal:
    """The settings of standard input, output and error, to restore them.

    A rank may change them (to ask for a password, or for a non-blocking event loop) and end before
    it has restored them.
    """

    def __init__(self) -> None:
        self.flags: dict[int, int] = {}
        self.modes: dict[int, list[Any]] = {}
        for fd in (0, 1, 2):
            with contextlib.suppress(OSError):
                self.flags[fd] = fcntl.fcntl(fd, fcntl.F_GETFL)
            with contextlib.suppress(termios.error):
                self.modes[fd] = termios.tcgetattr(fd)

    def restore(self) -> None:
        for fd, flags in self.flags.items():
            with contextlib.suppress(OSError):
                if fcntl.fcntl(fd, fcntl.F_GETFL) != flags:
                    fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        for fd, modes in self.modes.items():
            with contextlib.suppress(OSError, termios.error):
                # In the background, the terminal belongs to another program by now.
                if termios.tcgetattr(fd) != modes and os.tcgetpgrp(fd) == os.getpgrp():
                    former = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
                    termios.tcsetattr(fd, termios.TCSADRAIN, modes)
                    signal.signal(signal.SIGTTOU, former)
