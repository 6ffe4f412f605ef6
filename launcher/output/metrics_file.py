"""The file that node_exporter reads: hvdrun replaces it now and then with what the ranks have told.

A thread writes it, as a file system may hang, and hosts end their ranks if hvdrun falls silent.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable

from hvdrun.errors import UsageError
from hvdrun.machine.own_files import open_folder, replace

EVERY_S = 10.0
# At the end of the job, the last write may take this long.
LAST_S = 2.0
_FOR_ALL = 0o644  # node_exporter is another user


class MetricsFile:
    """text: the content, if the job runs or if it has ended; called by a thread."""

    def __init__(self, path: str, text: Callable[[bool], str]) -> None:
        self.path = path
        self.text = text
        self.failure: str | None = None  # why it can't be written; "": hvdrun has said it
        self.ends = threading.Event()
        self.thread = threading.Thread(target=self._run, name="metrics file", daemon=True)

    def begin(self) -> None:
        self.thread.start()

    def end(self) -> None:
        """Writes once more."""
        if self.thread.ident is not None:
            self.ends.set()
            self.thread.join(LAST_S)

    def take_failure(self) -> str:
        """The line about the first write that has failed, once; else ""."""
        line = self.failure
        if line:
            self.failure = ""
        return line or ""

    def _run(self) -> None:
        while not self.ends.is_set():
            self._write(is_running=True)
            self.ends.wait(EVERY_S)
        self._write(is_running=False)

    def _write(self, is_running: bool) -> None:
        try:
            write(self.path, self.text(is_running))
        except OSError as error:
            if self.failure is None:
                self.failure = f"hvdrun: --metrics-file {self.path}: {reason(error)}"


def check(path: str) -> None:
    """Makes the file, without values. Raises UsageError if that is not possible."""
    try:
        write(path, "# hvdrun starts the job\n")
    except OSError as error:
        raise UsageError(f"--metrics-file {path}: {reason(error)}") from error


def write(path: str, text: str, mode: int | None = _FOR_ALL) -> None:
    """Replaces the file at once, or the symlink to one. mode: see `own_files.replace`. Raises
    OSError."""
    folder, name = os.path.split(path)
    if not name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    descriptor = open_folder(folder)
    try:
        _check_replaceable(descriptor, name)
        replace(descriptor, name, text.encode(errors="replace"), mode)
    finally:
        os.close(descriptor)


def _check_replaceable(folder: int, name: str) -> None:
    """root may replace /dev/null itself, and must not."""
    try:
        mode = os.stat(name, dir_fd=folder).st_mode
    except FileNotFoundError:  # or a symlink that leads nowhere
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise FileExistsError(errno.EEXIST, "this is no regular file, which hvdrun could replace")


def reason(error: OSError) -> str:
    return error.strerror or str(error)
