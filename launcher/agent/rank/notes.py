"""The keeper's end of what a rank tells: notes, its black box, and its Python stack (the rank's
end: `hvdlite.world.telling`). What a rank writes is not trusted.

The black box is memory in which the rank keeps its last operations. It outlives the rank, as the
keeper has it too. This only copies entries, which `reports.black_box` reads.

For the stack the rank has a handler for a real-time signal, which writes the stack of its main
thread into a file in memory that both have. The signal goes to the main thread alone. When has the
handler ended? The kernel blocks a signal while its handler runs, which /proc shows. But for a
moment before that the signal is neither pending nor blocked. So it has ended once the file has
something in it and after that the signal is neither.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import socket
import struct
import time
import zlib
from collections.abc import Callable

from hvdrun.agent.frames import receive
from hvdrun.machine.notes import (
    ENTRY_BYTES,
    HEAD_BYTES,
    TOTAL_BYTES,
    VARIABLE,
    address,
    is_valid,
    lines_in,
)

# A rank that writes more, and one more each second, has gone mad: the keeper stops listening.
MOST_NOTES = 10_000


class RankNotes:
    """Calls `tell` with each valid note and the descriptors that came with it, which `tell` closes
    or keeps."""

    def __init__(
        self,
        environment: dict[str, str],
        poll: select.poll,
        tell: Callable[[bytes, list[int]], None],
    ) -> None:
        """Adds the variable to the rank's environment."""
        self.poll = poll
        self.tell = tell
        self.heard = 0
        self.begun_s = time.monotonic()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self.ours: socket.socket | None = ours
        self.theirs = theirs
        os.set_inheritable(theirs.fileno(), True)
        environment[VARIABLE] = address(theirs.fileno())

    def begin(self) -> None:
        """To be called once the rank has its end."""
        self.theirs.close()
        assert self.ours is not None
        self.poll.register(self.ours, select.POLLIN)

    def hear(self) -> bool:
        """Takes all notes that have arrived. False when the rank has just closed its end."""
        while self.ours is not None:
            note = b""
            fds: list[int] = []
            with contextlib.suppress(OSError):
                try:
                    note, fds = receive(self.ours)
                except BlockingIOError:
                    return True
            self.heard += 1
            if not note or self.heard > MOST_NOTES + time.monotonic() - self.begun_s:
                self.poll.unregister(self.ours)
                self.ours.close()
                self.ours = None
                return bool(note)
            if is_valid(note):
                self.tell(note, fds)
            else:
                for fd in fds:
                    os.close(fd)
        return True


# What follows a rank that has ended well: a later failure of others may come from its leaving.
FEW = 32

_TICKET = struct.Struct("=Q")
_GET_SEALS = 1034  # fcntl's F_GET_SEALS, which files in memory alone have


class RankBox:
    def __init__(self) -> None:
        self.fd: int | None = None

    def keep(self, fd: int) -> None:
        """Instead of an earlier one. Closes what is no memory: reading it could take for ever."""
        try:
            fcntl.fcntl(fd, _GET_SEALS)
        except OSError:
            os.close(fd)
            return
        if self.fd is not None:
            os.close(self.fd)
        self.fd = fd

    def read(self, all_of_them: bool) -> bytes:
        """The text at its begin, a NUL, where the script has waited last, a NUL, and the last
        entries in their order, all of it compressed. Empty if there are none. The rank may run on:
        of an entry whose ticket has changed since it was read, it was writing."""
        if self.fd is None:
            return b""
        data = later = b""
        with contextlib.suppress(OSError):
            data = os.pread(self.fd, TOTAL_BYTES, 0)
            later = os.pread(self.fd, TOTAL_BYTES, 0)
        head = data[:HEAD_BYTES].partition(b"\0")[0]
        found = []
        for at in range(HEAD_BYTES, len(data) - ENTRY_BYTES + 1, ENTRY_BYTES):
            (ticket,) = _TICKET.unpack_from(data, at)
            # 0: it was being written when the rank was killed, or never.
            if ticket and later[at : at + _TICKET.size] == data[at : at + _TICKET.size]:
                found.append((ticket, at))
        if not found:
            return b""
        found.sort()
        last = found if all_of_them else found[-FEW:]
        entries = b"".join(data[at : at + ENTRY_BYTES] for _, at in last)
        lines = lines_in(data, zlib.crc32)
        return zlib.compress(b"\0".join((head, lines, entries)), 6)

    def lines(self) -> str:
        """Where the script has waited for hvdlite last, in faulthandler's form."""
        data = b""
        if self.fd is not None:
            with contextlib.suppress(OSError):
                data = os.pread(self.fd, TOTAL_BYTES, 0)
        return lines_in(data, zlib.crc32).decode(errors="replace")


STACK_S = 1.0  # the keeper does nothing else meanwhile
_PAUSE_S = 0.002
_LARGEST_BYTES = 1 << 16
_MOST_FRAMES = 100
# The kernel's limits; the note is the rank's own.
_MOST_PID, _MOST_SIGNAL, _MOST_FD = 1 << 22, 64, (1 << 20) - 1


class RankStack:
    """`note`: the data of the rank's note; `fd`: the file that came with it, closed by `close`."""

    def __init__(self, note: bytes, fd: int) -> None:
        """Raises ValueError."""
        numbers, *folders = note.decode(errors="replace").split("\0")
        self.pid, self.number, self.their_fd = map(int, numbers.split())
        for value, least, most in (
            (self.pid, 1, _MOST_PID),
            (self.number, 1, _MOST_SIGNAL),
            (self.their_fd, 0, _MOST_FD),
        ):
            if not least <= value <= most:
                raise ValueError(f"{value} is not in {least}..{most}")
        self.fd = fd
        self.roots = [
            (f"{folder}/", name) for folder, name in zip(folders, _NAMES, strict=False) if folder
        ]

    def close(self) -> None:
        os.close(self.fd)

    def read(self) -> tuple[list[list[object]], str]:
        """The frames, the innermost first, each with file, line, function and library ("": the
        script's own); and if there are none, why."""
        try:
            if not self.has_the_file():
                return [], "it has closed the file for its stack"
            why = self._ask()
            text = os.pread(self.fd, _LARGEST_BYTES, 0).decode(errors="replace")
            return self.frames_in(text), why
        except (OSError, ValueError, LookupError) as error:
            return [], f"its stack can't be read: {error}"

    def _ask(self) -> str:
        os.ftruncate(self.fd, 0)  # whatever comes of it: an earlier answer is none to this
        status = self._status()
        bit = 1 << (self.number - 1)
        if status["State"] in _STOPPED:
            return ""  # which is said anyway
        if not int(status["SigCgt"], 16) & bit or int(status["SigBlk"], 16) & bit:
            changed = f"it is ending, or has changed what signal {self.number} does"
            return f"{changed}, so its stack can't be read"
        _send(self.pid, self.number)
        end = time.monotonic() + STACK_S
        while time.monotonic() < end:
            has_begun = os.fstat(self.fd).st_size > 0
            status = self._status()
            if has_begun and not (int(status["SigPnd"], 16) | int(status["SigBlk"], 16)) & bit:
                return ""
            time.sleep(_PAUSE_S)
        return "it does not leave the kernel, so its stack can't be read"

    def has_the_file(self) -> bool:
        """The process is still the one that sent the note, and would write into no other file."""
        own = os.fstat(self.fd)
        try:
            theirs = os.stat(f"/proc/{self.pid}/fd/{self.their_fd}")
        except OSError:
            return False
        return (own.st_dev, own.st_ino) == (theirs.st_dev, theirs.st_ino)

    def _status(self) -> dict[str, str]:
        with open(f"/proc/{self.pid}/task/{self.pid}/status", "rb") as file:
            lines = file.read().decode(errors="replace").splitlines()
        found = dict(line.partition(":")[::2] for line in lines)
        return {name: value.split()[0] for name, value in found.items() if value.split()}

    def frames_in(self, text: str) -> list[list[object]]:
        """text: in faulthandler's form."""
        found = re.findall(r'^  File "(.*)", line ([0-9]{1,9}|\?\?\?) in (.*)$', text, re.MULTILINE)
        return [
            [file, int(line) if line.isdecimal() else 0, function, self._library(file)]
            for file, line, function in found[:_MOST_FRAMES]
        ]

    def _library(self, file: str) -> str:
        if file.startswith("<frozen "):
            return _PYTHON
        installed = re.search(r"/(?:site|dist)-packages/([^/]+)", file)
        for root, name in self.roots:
            if file.startswith(root) and not (installed and name == _PYTHON):
                return name
        return installed[1].removesuffix(".py") if installed else ""


class RankStacks:
    """What processes of the rank have offered. A program that the rank has started may have been
    the last one: it counts until it has ended, or is another program."""

    def __init__(self) -> None:
        self._offered: list[RankStack] = []  # the last one is the newest

    def add(self, note: bytes, fd: int) -> None:
        """As for RankStack. Raises ValueError; then the descriptor is still the caller's."""
        newest = RankStack(note, fd)
        for each in list(self._offered):
            if each.pid == newest.pid or not each.has_the_file():
                self._remove(each)
        if len(self._offered) == _MOST_OFFERED:
            self._remove(self._offered[0])
        self._offered.append(newest)

    def newest(self) -> RankStack | None:
        """Of a process that still has its file, if there is one."""
        while len(self._offered) > 1 and not self._offered[-1].has_the_file():
            self._remove(self._offered[-1])
        return self._offered[-1] if self._offered else None

    def _remove(self, stack: RankStack) -> None:
        self._offered.remove(stack)
        stack.close()


_MOST_OFFERED = 8
_PYTHON = "Python"
# Of the folders in the note, in their order.
_NAMES = ("hvdlite", "torch", _PYTHON)
_STOPPED = frozenset("TtZX")
_TGKILL = {"x86_64": 234, "aarch64": 131, "ppc64le": 250, "riscv64": 131, "s390x": 241}


def _send(pid: int, number: int) -> None:
    """To the main thread, as any other thread has another stack. Where the number of the system
    call is not known, the kernel chooses, and prefers that one."""
    call = _TGKILL.get(os.uname().machine)
    if call is None:
        os.kill(pid, number)
        return
    import ctypes  # some ms, which a keeper's start shall not take

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(call), pid, pid, number):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
