"""The black box: this rank's latest operations, in memory that its keeper has, too.

The C core writes it (`_core/operations/black_box.h`); the keeper reads it when the rank has ended,
however it ended, and sends it to hvdrun.
"""

from __future__ import annotations

import collections
import ctypes
import json
import mmap
import os
import threading
import time
import zlib

from hvdlite import _core
from hvdlite.world.config import Config
from hvdlite.world.telling import last_line, launcher_link
from hvdrun.for_hvdlite import FORMAT, notes

_NAME = "hvdrun-black-box"
_lock = threading.Lock()
# Of this process. None: no keeper has it.
_memory: mmap.mmap | None = None
_made_by: int | None = None  # the process that has tried
# How many engines this process has made for the same ranks: every member makes them in the same
# order.
_teams: collections.Counter[tuple[int, ...]] = collections.Counter()


def for_engine(config: Config, ranks: tuple[int, ...]) -> tuple[int, int]:
    """Where an engine of these ranks is to write (an address; 0: nowhere), and its number there:
    the same on every member, and another for each engine."""
    if not config.black_box or len(ranks) == 1:
        return 0, 0
    with _lock:
        number = _teams[ranks]
        _teams[ranks] += 1
        memory = _give_to_keeper()
    if memory is None:
        return 0, 0
    team = zlib.crc32(f"{number} {ranks}".encode())
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)), team


def _give_to_keeper() -> mmap.mmap | None:
    """Once per process; None without hvdrun."""
    global _memory, _made_by
    if _made_by == os.getpid():
        return _memory
    _memory, _made_by = None, os.getpid()  # a fork's memory is its parent's
    if launcher_link.keeper()[0] < 0:
        return None
    try:
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError:
        return None
    try:
        os.ftruncate(fd, _core.BLACK_BOX_BYTES)
        memory = mmap.mmap(fd, _core.BLACK_BOX_BYTES)
        head = _head()
        memory[: len(head)] = head
        if launcher_link.tell(notes.BLACK_BOX, b"", [fd]):
            _memory = memory
            last_line.keep_in(memory)
            # Never unmapped: threads of engines write there until the process ends.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
    except OSError:
        return None  # what only explains a failure must cause none
    finally:
        os.close(fd)
    return _memory


def _head() -> bytes:
    """What a reader must know beside the entries, as a text that ends with a NUL."""
    known = {
        "format": FORMAT,
        "kinds": _core.KIND_NAMES,
        "pid": os.getpid(),
        # The entries' times are those of the monotonic clock, which differs between hosts.
        "to_wall_ns": time.time_ns() - time.monotonic_ns(),
    }
    return json.dumps(known).encode() + b"\0"
