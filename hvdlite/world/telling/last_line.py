"""Where the script has waited for hvdlite last, in the memory of the black box: a rank that is
stopped or has been killed can't be asked for its stack.

The lines are those of the main thread's calls, without the libraries'. They are written at most
every EVERY_S, as finding them takes some microseconds, and with the time: where several operations
have begun since, as in a backward that was not noted, they may name the wrong line, and the keeper
drops them.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import sys
import sysconfig
import threading
import time
import zlib

import torch

from hvdrun.for_hvdlite import LINES_AT, LINES_BYTES, pack_lines

EVERY_S = 0.005
_MOST_CALLS = 8
_MOST_FILES = 4096

clock = time.monotonic
due = math.inf  # when to note the next time; never without memory

_memory: mmap.mmap | None = None
# By file: whether it is the script's.
_is_script: dict[str, bool] = {}


def keep_in(memory: mmap.mmap) -> None:
    """From now on."""
    global _memory, due
    _memory, due = memory, 0.0


def look() -> None:
    """To be called before a wait."""
    if clock() >= due:
        note()


def note() -> None:
    """The same, once `clock()` has reached `due`."""
    global due
    if _memory is None or threading.get_ident() != threading.main_thread().ident:
        return
    due = clock() + EVERY_S
    lines: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(lines) < _MOST_CALLS:
        code = frame.f_code
        if _of_script(code.co_filename):
            lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
        frame = frame.f_back  # type: ignore[assignment]
    if lines:
        _memory[LINES_AT : LINES_AT + LINES_BYTES] = pack_lines(
            lines, time.monotonic_ns(), zlib.crc32
        )


def _of_script(file: str) -> bool:
    known = _is_script.get(file)
    if known is None:
        if len(_is_script) >= _MOST_FILES:
            _is_script.clear()
        path = file
        if not file.startswith("<"):
            # (The name of generated code may be relative, and the working directory removed.)
            with contextlib.suppress(OSError):
                path = os.path.abspath(file)
        known = _is_script[file] = not (
            path.startswith((*_LIBRARIES, "<frozen ")) or "/site-packages/" in path
        )
    return known


_LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for folder in (
        os.path.abspath(f"{__file__}/../../.."),  # of the package hvdlite
        os.path.dirname(os.path.abspath(torch.__file__)),
        sysconfig.get_path("stdlib"),
    )
)


def _forget() -> None:
    """A fork has its parent's memory."""
    global _memory, due
    _memory, due = None, math.inf


os.register_at_fork(after_in_child=_forget)
