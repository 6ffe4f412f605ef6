"""Remembers the answers of hosts for a while: a file each in the user's cache folder.

A file that can't be read or written is treated as missing, never as an error. So is a folder that
others may write to, as the answers decide how the job starts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hvdrun.machine.own_files import open_folder, replace

LIFETIME_S = 3600.0


def cache_folder(environ: Mapping[str, str]) -> Path | None:
    """By the XDG specification; None if there is no home folder."""
    base = environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        home = environ.get("HOME", "")
        if not os.path.isabs(home):
            return None
        base = f"{home}/.cache"
    return Path(base, "hvdrun", "preflight")


class AnswerCache:
    """Values by keys; both are anything that JSON can write."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.used: list[str] = []  # what `forget` removes

    def get(self, key: object) -> Any:
        """The value, or None if there is none, or only an old one."""
        name = _name(key)
        with (
            contextlib.suppress(OSError, ValueError),
            self._opened() as folder,
            open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)) as file,
        ):
            # A time in the future comes from a wrong clock, here or on a file server.
            if 0 <= time.time() - os.fstat(file.fileno()).st_mtime < LIFETIME_S:
                value = json.load(file)
                self.used.append(name)
                return value
        return None

    def put(self, key: object, value: object) -> None:
        name = _name(key)
        with contextlib.suppress(OSError), self._opened(make=True) as folder:
            _remove_old(folder)
            replace(folder, name, json.dumps(value).encode())
            self.used.append(name)

    def forget(self) -> None:
        """Removes all that was read or written, as something went wrong with those hosts."""
        with contextlib.suppress(OSError), self._opened() as folder:
            for name in self.used:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=folder)
        self.used.clear()

    @contextlib.contextmanager
    def _opened(self, make: bool = False) -> Iterator[int]:
        if self.folder is None:
            raise FileNotFoundError
        folder = open_folder(str(self.folder), 0o700 if make else None)
        try:
            status = os.fstat(folder)
            if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise PermissionError
            yield folder
        finally:
            os.close(folder)


def _name(key: object) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


def _remove_old(folder: int) -> None:
    limit = time.time() - LIFETIME_S
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            if os.stat(name, dir_fd=folder).st_mtime < limit:
                os.unlink(name, dir_fd=folder)
