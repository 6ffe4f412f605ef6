"""Which disk is full, where that is why a rank fails: torch.save raises an error that does not say
so, and Python's own names no file where it comes from a write."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

# No file can be written any more, or no larger one.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What a disk says that has no files without a name, such as a file server's.
_NO_UNNAMED_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)
_TORCH = os.path.join("torch", "serialization.py")
# A disk on which so much can be written is not full.
_PROBE_BYTES = 1 << 20
_MOST_ERRORS = 8


def hint(error: BaseException) -> str:
    """One line about the file that could not be written; empty if that was not the cause. It tries
    whether the disk takes more, and leaves nothing there."""
    for each in _chain(error):
        told = each.errno if isinstance(each, OSError) and each.errno in _FULL else 0
        for path in _paths(each, bool(told)):
            number = told if told == errno.EFBIG else _why_full(path)
            if number:
                return f"hvdlite: {os.strerror(number)}: {path!r} {_about(path, number)}"
    return ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that were being handled."""
    current: BaseException | None = error
    for _ in range(_MOST_ERRORS):
        if current is None:
            return
        yield current
        current = current.__cause__ or current.__context__


def _paths(error: BaseException, told: bool) -> Iterator[str]:
    """The files that may be meant, the likeliest first. told: the error is that of a full disk,
    though it may not say of which one."""
    if told and isinstance(error, OSError) and isinstance(error.filename, str):
        yield os.path.abspath(error.filename)
    frames = list(_frames(error.__traceback__))
    for file, function, variables in reversed(frames):
        if file.endswith(_TORCH) and function == "save" and "f" in variables:
            yield from _path_of(variables["f"])
        elif told:
            for value in variables.values():
                if isinstance(value, io.IOBase):
                    yield from _path_of(value)


def _frames(trace: TracebackType | None) -> Iterator[tuple[str, str, dict[str, object]]]:
    """Of each its file, its function and its variables."""
    while trace is not None:
        code = trace.tb_frame.f_code
        yield code.co_filename, code.co_name, trace.tb_frame.f_locals
        trace = trace.tb_next


def _path_of(file: object) -> Iterator[str]:
    name = file if isinstance(file, str | Path) else getattr(file, "name", None)
    if isinstance(name, str | Path):
        yield os.path.abspath(name)


def _why_full(path: str) -> int:
    """The number of the error with which the file can't grow, or none beside it can; 0: it can."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    with contextlib.suppress(OSError):
        if limit != resource.RLIM_INFINITY and os.stat(path).st_size + _PROBE_BYTES > limit:
            return errno.EFBIG
    folder = os.path.dirname(path)
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o600)
    except OSError as error:
        if error.errno in _FULL:
            return error.errno
        if error.errno not in _NO_UNNAMED_FILES:
            return 0
        with contextlib.suppress(OSError):
            disk = os.statvfs(folder)
            is_full = disk.f_bavail * disk.f_frsize < _PROBE_BYTES
            return errno.ENOSPC if is_full and not disk.f_flag & os.ST_RDONLY else 0
        return 0
    try:
        os.posix_fallocate(fd, 0, _PROBE_BYTES)
    except OSError as error:
        return error.errno if error.errno in _FULL else 0
    finally:
        os.close(fd)
    return 0


def _about(path: str, number: int) -> str:
    if number == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return f"can't grow beyond {limit} bytes (ulimit -f); raise the limit"
    at = os.path.dirname(path)
    while not os.path.ismount(at):
        at = os.path.dirname(at)
    free = ""
    if number == errno.ENOSPC:
        disk = os.statvfs(at)
        mib = disk.f_frsize / (1 << 20)
        free = f", of which {disk.f_bavail * mib:.1f} of {disk.f_blocks * mib:.1f} MiB are free"
    return f"is on the disk mounted at {at!r}{free}; make room there, or write to another disk"
