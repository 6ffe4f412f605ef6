"""What is typed while the job is shown live: each key counts at once and is not shown.

The terminal's other settings stay: Ctrl-C and Ctrl-Z are the signals that they always are. Its
settings are put back at the end, and are set again after the shell has put its own there, while
hvdrun was stopped (`kill -STOP`, then `fg`).
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import termios
from collections.abc import Callable, Iterator
from typing import Any

from hvdrun.output.pane import is_in_front

_LFLAG, _CC = 3, 6
# Arrows and the like, and what a terminal answers.
_SEQUENCES = re.compile(rb"\x1b(?:\[[0-9;?<]*[ -/]*[@-~]|O.|\][^\x07]*\x07?|.)?", re.DOTALL)


def are_possible() -> bool:
    """Whether standard input is a terminal from which this process may read."""
    return os.isatty(0) and is_in_front(0)


class Keys:
    """Calls `on_keys` with what was typed at once, as text."""

    def __init__(self, selector: selectors.BaseSelector, on_keys: Callable[[str], None]) -> None:
        self._selector = selector
        self._on_keys = on_keys
        self._before: list[Any] | None = None  # the terminal's settings
        self._is_open = True

    def look(self) -> None:
        """Takes the terminal, if it is free and not taken: to be called now and then."""
        if not self._is_open:
            return
        if not is_in_front(0):
            self._leave()
            return
        with contextlib.suppress(termios.error):
            modes = termios.tcgetattr(0)
            if modes[_LFLAG] & (termios.ICANON | termios.ECHO):
                if self._before is None:
                    self._before = [*modes[:_CC], list(modes[_CC])]
                modes[_LFLAG] &= ~(termios.ICANON | termios.ECHO)
                modes[_CC][termios.VMIN], modes[_CC][termios.VTIME] = 1, 0
                _set(modes)
        with contextlib.suppress(KeyError):  # it is registered
            self._selector.register(0, selectors.EVENT_READ, self._read)

    def end(self) -> None:
        """Puts the terminal's settings back."""
        self._is_open = False
        self._leave()
        if self._before is not None and is_in_front(0):
            with contextlib.suppress(termios.error):
                _set(self._before)

    def _leave(self) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(0)

    def _read(self) -> None:
        if not is_in_front(0):
            self._leave()
            return
        try:
            with _ignored(signal.SIGTTIN):
                data = os.read(0, 1024)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:  # the terminal is gone
            self._is_open = False
            self._leave()
            return
        if keys := _SEQUENCES.sub(b"", data).decode(errors="ignore"):
            self._on_keys(keys)


def _set(modes: list[Any]) -> None:
    with _ignored(signal.SIGTTOU):
        termios.tcsetattr(0, termios.TCSANOW, modes)


@contextlib.contextmanager
def _ignored(number: int) -> Iterator[None]:
    """In case the terminal has just gone to another program: the signal would stop hvdrun."""
    former = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, former)
