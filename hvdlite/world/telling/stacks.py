"""Lets hvdrun see where this rank is: at a signal of its keeper, the rank writes the Python stack
of its main thread into a file in memory that the keeper has, too.

faulthandler's handler does it, in C: it needs no GIL, so that it works while the main thread holds
it in C, sleeps or waits for a lock. It restarts the system call that it interrupts, and runs no
code of the script's.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import sysconfig

import torch

from hvdlite.world.telling import launcher_link
from hvdrun.for_hvdlite import notes

_NAME = "hvdrun-stack"
_offered_by: int | None = None  # the process that has offered it
# The note, its descriptor, and which file that is: the program may close it and open another one.
_offered: tuple[bytes, int, os.stat_result] | None = None


def offer() -> None:
    """Tells the rank's keeper how to get the stack. Nothing without hvdrun.

    Where hvdlite is imported, as a rank may hang before `init`, and by `init`: meanwhile a program
    that this process has started may have offered its own, and the keeper takes the last one
    that lives. The handler is installed once per process.
    """
    global _offered_by
    if launcher_link.keeper()[0] < 0:
        return
    if _offered_by != os.getpid() or (_offered and not _is_open(*_offered[1:])):
        _offered_by = os.getpid()
        _install()
    elif _offered:
        launcher_link.tell(notes.STACK, _offered[0], [_offered[1]], claims=False)


def _is_open(fd: int, was: os.stat_result) -> bool:
    try:
        now = os.fstat(fd)
    except OSError:
        return False
    return (now.st_dev, now.st_ino) == (was.st_dev, was.st_ino)


def _install() -> None:
    global _offered
    _offered = None
    number = _free_signal()
    if number is None:
        return
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)  # the keeper empties it
    faulthandler.register(number, fd, all_threads=False, chain=False)
    folders = (
        os.path.abspath(f"{__file__}/../../.."),  # of the package hvdlite
        os.path.dirname(os.path.abspath(torch.__file__)),
        sysconfig.get_path("stdlib"),
    )
    words = [f"{os.getpid()} {number} {fd}", *folders]
    note = "\0".join(words).encode(errors="replace")
    if launcher_link.tell(notes.STACK, note, [fd], claims=False):
        _offered = note, fd, os.fstat(fd)
    else:
        faulthandler.unregister(number)
        os.close(fd)


def _free_signal() -> int | None:
    """A real-time signal that nobody uses: neither caught, nor ignored, nor blocked."""
    taken = 0
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith(("SigCgt:", "SigIgn:", "SigBlk:")):
                    taken |= int(line.split()[1], 16)
    except OSError:
        return None
    # Tools take the last ones, programs the first ones.
    numbers = range(signal.SIGRTMAX - 3, signal.SIGRTMIN + 3, -1)
    return next((number for number in numbers if not taken >> (number - 1) & 1), None)
