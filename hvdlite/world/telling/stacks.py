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


def offer() -> None:
    """Tells the rank's keeper how to get the stack, once per process. Nothing without hvdrun."""
    global _offered_by
    if _offered_by == os.getpid() or launcher_link.keeper()[0] < 0:
        return
    _offered_by = os.getpid()
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
    if not launcher_link.tell(notes.STACK, "\0".join(words).encode(errors="replace"), [fd]):
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
