"""The timeline's file: an array of JSON that is complete after every write.

Several ranks of a host write to it. A write holds the file's lock, overwrites the end of the array
with more events, and writes the end again. So no rank needs to be the last, however the job ends.
Only a kill in the middle of a write leaves the end out.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterable, Iterator
from typing import Any

from hvdrun.for_hvdlite import Identity, identity, open_file

END = b"\n]\n"
# How long a write waits for the lock. A rank that is stopped in a write keeps it.
LOCK_S = 2.0
LOCK_PAUSE_S = 0.002


def encoded(events: Iterable[dict[str, Any]]) -> list[bytes]:
    """A line per event, without the comma between two of them."""
    return [json.dumps(event).encode() for event in events]


class TraceFile:
    """Writes events to the file. `shared`: other processes write to it, too."""

    def __init__(self, descriptor: int, shared: bool) -> None:
        self._descriptor: int | None = descriptor
        self._shared = shared
        self._is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)

    def write(self, lines: list[bytes]) -> None:
        """Adds events.

        Raises:
            OSError: They can't be written; the array in the file is as it was before.
        """
        descriptor = self._descriptor
        if not lines or descriptor is None:
            return
        if not self._is_file:
            _write_all(descriptor, b"".join(b",\n" + line for line in lines))
            return
        with self._lock(descriptor):
            size = os.fstat(descriptor).st_size
            text = b"".join(b",\n" + line for line in lines) + END
            at = size - len(END)
            try:
                _write_all(descriptor, text, at)
            except OSError:
                with contextlib.suppress(OSError):
                    _write_all(descriptor, END, at)
                    os.ftruncate(descriptor, size)
                raise

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        if not self._is_file:
            with contextlib.suppress(OSError):
                _write_all(descriptor, END)
        os.close(descriptor)

    @contextlib.contextmanager
    def _lock(self, descriptor: int) -> Iterator[None]:
        if not self._shared:
            yield
            return
        give_up_at = time.monotonic() + LOCK_S
        while not _locks(descriptor):
            if time.monotonic() > give_up_at:
                raise TimeoutError(
                    f"another rank has held the file's lock for {LOCK_S:.0f} s; is it stopped?"
                )
            time.sleep(LOCK_PAUSE_S)
        try:
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def create(path: str, first: list[bytes]) -> tuple[TraceFile, str, Identity | None]:
    """Makes or empties the file, which then holds the first events, at least one. Returns it, its
    whole path, and the identity by which other processes know it; None: they can't share it.

    Raises:
        OSError: It can't be written.
    """
    path = os.path.abspath(path)
    descriptor = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        _write_all(descriptor, b"[\n" + b",\n".join(first) + (END if is_file else b""))
        shared = is_file and _can_lock(descriptor)
        known_as = identity(descriptor) if shared else None
        return TraceFile(descriptor, shared), path, known_as
    except BaseException:
        os.close(descriptor)
        raise


def open_shared(path: str, known_as: Identity | None) -> TraceFile | None:
    """The file that another process has created; None if this process can't open and lock it, or
    the path is another file here."""
    if known_as is None:
        return None
    with contextlib.suppress(OSError):
        descriptor = open_file(path, os.O_WRONLY, same_as=known_as)
        if _can_lock(descriptor):
            return TraceFile(descriptor, True)
        os.close(descriptor)
    return None


def _locks(descriptor: int) -> bool:
    """Takes the lock if it is free."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _can_lock(descriptor: int) -> bool:
    """Not every file system of a network has locks."""
    try:
        if _locks(descriptor):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    except OSError:
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
