"""The terminal that hvdrun was started from: what is one, and how it was."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import termios
from collections.abc import Mapping
from typing import Any


def terminals() -> frozenset[int]:
    """Which of stdout and stderr are one."""
    return frozenset(fd for fd in (1, 2) if os.isatty(fd))


def open_standard_files() -> None:
    """Those that the caller has closed, as some that start daemons do: what is opened next would
    take their numbers, and be written to."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)


def is_coloured(environ: Mapping[str, str]) -> bool:
    """Whether a terminal is wanted in colour, as https://no-color.org says it."""
    return not environ.get("NO_COLOR") and environ.get("TERM", "dumb") != "dumb"


class Terminal:
    """How standard input, output and error are set, to set them so again.

    The ranks may change them (a password that is asked for, an event loop that does not block) and
    be ended before they have put it right.
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
                # In the background it is another program's by now.
                if termios.tcgetattr(fd) != modes and os.tcgetpgrp(fd) == os.getpgrp():
                    former = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
                    termios.tcsetattr(fd, termios.TCSADRAIN, modes)
                    signal.signal(signal.SIGTTOU, former)
