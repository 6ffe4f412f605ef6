"""The timeline's file: an array of JSON that is complete at every moment, also after `kill -9`.

Several ranks of a host write to it. A write holds a lock, which is in memory that only this user
can open (everybody who can read a file can lock it), overwrites the array's closing bracket with
more events, and writes the bracket again. So no rank needs to be the last, however the job ends.

The kernel ends a killed process's write between two pages, never within one: it looks for the
signal before each page, and copies what the caller has in a single page of memory at once. So every
write here lies within one block of the file. The bracket crosses the border of two blocks in three
steps, each of which leaves a complete array: spaces until it is the last byte of its block; spaces
in the next block, as JSON may end in white space; and one store of two bytes, ` ]`, across the
border in the mapped file, since no signal interrupts an instruction. Where a file can't be mapped,
as on some file systems of a network, these two bytes are written, and a kill between them, within
a microsecond per 4 KiB, leaves the bracket out.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import resource
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from hvdrun.for_hvdlite import Identity, identity, open_file

END = b"]\n"
# Every page of memory and of a file, on all machines, consists of such blocks.
BLOCK = 4096
# The longest line: names of operations are cut by the engine.
LONGEST_LINE = BLOCK // 2
# Where the end of the array is looked for: what may follow it is at most GAP.
TAIL_BYTES = 64
GAP = b" " * 15 + b"\n"
# How long a write waits for the lock. A rank that is stopped in a write keeps it.
LOCK_S = 2.0
LOCK_PAUSE_S = 0.002
# madvise: maps the pages for writing now, and fails where a store would raise SIGBUS. Since 5.14.
POPULATE_WRITE = 23
# As it is stored across the border.
MOVED_END = int.from_bytes(b" ]", sys.byteorder)


class Known(NamedTuple):
    """By what other processes of the host know the file and its lock."""

    file: Identity
    lock_path: str
    lock: Identity


def encoded(events: Iterable[dict[str, Any]]) -> list[bytes]:
    """A line per event, without the comma between two of them."""
    return [json.dumps(event).encode() for event in events]


class TraceFile:
    """Writes events to the file. lock: other processes write to it, too, and hold this meanwhile;
    -1: none do."""

    def __init__(self, descriptor: int, lock: int) -> None:
        self._descriptor: int | None = descriptor
        self._lock_descriptor = lock
        self._is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        # What is written lies in one page of this process's memory, too.
        self._page = mmap.mmap(-1, BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def write(self, lines: list[bytes]) -> None:
        """Adds events, each of at most LONGEST_LINE. Takes those that it has written out of the
        list.

        Raises:
            OSError: The rest can't be written; the array in the file is complete.
        """
        descriptor = self._descriptor
        if not lines or descriptor is None:
            return
        if not self._is_file:
            _write_all(descriptor, b"".join(b",\n" + line for line in lines))
            lines.clear()
            return
        with self._lock():
            at = _end_of_array(descriptor)
            done = 0
            try:
                while done < len(lines):
                    room = BLOCK - at % BLOCK - len(END)
                    text = b""
                    while done < len(lines) and len(text) + len(lines[done]) + 2 <= room:
                        text += b"," + lines[done] + b"\n"
                        done += 1
                    if text:
                        try:
                            self._write_in_block(descriptor, text + END, at)
                        except OSError:
                            done -= text.count(b"\n")
                            raise
                        at += len(text)
                    elif len(lines[done]) > LONGEST_LINE:
                        raise ValueError(f"an event of {len(lines[done])} bytes")
                    else:
                        at = self._move_to_next_block(descriptor, at)
            finally:
                del lines[:done]

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        if not self._is_file:
            with contextlib.suppress(OSError):
                _write_all(descriptor, b"\n" + END)
        os.close(descriptor)
        if self._lock_descriptor >= 0:
            os.close(self._lock_descriptor)

    def _write_in_block(self, descriptor: int, text: bytes, at: int) -> None:
        """Writes all of it or nothing."""
        assert at // BLOCK == (at + len(text) - 1) // BLOCK
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        if limit != resource.RLIM_INFINITY and at + len(text) > limit:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        self._page[: len(text)] = text
        with memoryview(self._page) as page:
            done = os.pwrite(descriptor, page[: len(text)], at)
        if done < len(text):
            # The file system has cut a block. What it has taken has room for the end.
            os.pwrite(descriptor, END, at)
            os.ftruncate(descriptor, at + len(END))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _move_to_next_block(self, descriptor: int, at: int) -> int:
        """Moves the end of the array from `at` to the start of the next block, which it returns."""
        border = at - at % BLOCK + BLOCK
        self._write_in_block(descriptor, b" " * (border - at - 1) + b"]", at)
        os.pwrite(descriptor, GAP, border)  # one byte of it is enough
        first = (border - BLOCK) // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        try:
            pages = mmap.mmap(descriptor, border + len(GAP) - first, offset=first)
        except (OSError, ValueError):
            _write_all(descriptor, b" ]", border - 1)
            return border
        with pages:
            try:
                pages.madvise(POPULATE_WRITE)
            except OSError as error:
                if error.errno != errno.EINVAL:  # else the kernel is older
                    _write_all(descriptor, b" ]", border - 1)
                    return border
            _store(pages, border - 1 - first)
        return border

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        lock = self._lock_descriptor
        if lock < 0:
            yield
            return
        give_up_at = time.monotonic() + LOCK_S
        while not _locks(lock):
            if time.monotonic() > give_up_at:
                raise TimeoutError(
                    f"another rank has held the file's lock for {LOCK_S:.0f} s; is it stopped?"
                )
            time.sleep(LOCK_PAUSE_S)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)


def _store(pages: mmap.mmap, at: int) -> None:
    """Stores MOVED_END by one instruction, which ctypes takes for numbers of two bytes."""
    ctypes.c_uint16.from_buffer(pages, at).value = MOVED_END


def _end_of_array(descriptor: int) -> int:
    """Where its closing bracket is.

    Raises:
        OSError: Something else has changed the file.
    """
    size = os.fstat(descriptor).st_size
    start = max(0, size - TAIL_BYTES)
    tail = os.pread(descriptor, size - start, start)
    at = tail.rfind(b"]")
    if at < 0 or tail[at + 1 :].strip():
        raise OSError(errno.EIO, "another program has changed the file")
    return start + at


def create(path: str, first: list[bytes]) -> tuple[TraceFile, str, Known | None]:
    """Makes or empties the file, which then holds the first events, at least one. Returns it, its
    whole path, and by what other processes know it; None: they can't share it.

    Raises:
        OSError: It can't be written.
    """
    path = os.path.abspath(path)
    # A pipe that is opened for reading, too, would not wait for its reader.
    is_other = os.path.exists(path) and not os.path.isfile(path)
    mode = os.O_WRONLY if is_other else os.O_RDWR
    descriptor = open_file(path, mode | os.O_CREAT | os.O_TRUNC)
    try:
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        _write_all(descriptor, b"[\n" + b",\n".join(first) + (b"\n" + END if is_file else b""))
        if not is_file:
            return TraceFile(descriptor, -1), path, None
        lock = os.memfd_create("hvdlite timeline's lock", os.MFD_CLOEXEC)
        lock_path = f"/proc/{os.getpid()}/fd/{lock}"
        known_as = Known(identity(descriptor), lock_path, identity(lock))
        return TraceFile(descriptor, lock), path, known_as
    except BaseException:
        os.close(descriptor)
        raise


def open_shared(path: str, known_as: Known | None) -> TraceFile | None:
    """The file that another process has created; None if this process can't open and lock it, or
    the path is another file here."""
    if known_as is None:
        return None
    with contextlib.suppress(OSError):
        # On another host, or in another PID namespace, this is another process, if any.
        found = os.stat(known_as.lock_path)
        if (found.st_dev, found.st_ino) != known_as.lock:
            return None
        lock = os.open(known_as.lock_path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return TraceFile(open_file(path, os.O_RDWR, same_as=known_as.file), lock)
        except BaseException:
            os.close(lock)
            raise
    return None


def _locks(descriptor: int) -> bool:
    """Takes the lock if it is free."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_all(descriptor: int, text: bytes, at: int | None = None) -> None:
    while text:
        if at is None:
            done = os.write(descriptor, text)
        else:
            done = os.pwrite(descriptor, text, at)
            at += done
        text = text[done:]
