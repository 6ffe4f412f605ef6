"""Remembers what hosts have answered, for a while: a file each in the user's cache folder.

What can't be read or written is not there, and never an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LIFETIME_S = 3600.0


def cache_folder(environ: Mapping[str, str]) -> Path | None:
    """As the XDG specification has it; None where there is no home."""
    base = environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        home = environ.get("HOME", "")
        if not os.path.isabs(home):
            return None
        base = f"{home}/.cache"
    return Path(base, "hvdrun", "preflight")


class Answers:
    """Values by keys, which are anything that JSON can write."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.used: list[Path] = []  # what `forget` removes

    def get(self, key: object) -> Any:
        """The value, or None where there is none, or none that is fresh."""
        path = self._path(key)
        if path is None:
            return None
        with contextlib.suppress(OSError, ValueError):
            # A time in the future is a clock that was wrong, here or at a file server's.
            if 0 <= time.time() - path.stat().st_mtime < LIFETIME_S:
                value = json.loads(path.read_text())
                self.used.append(path)
                return value
        return None

    def put(self, key: object, value: object) -> None:
        path = self._path(key)
        if path is None or self.folder is None:
            return
        with contextlib.suppress(OSError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._remove_old(self.folder)
            # Whole or not at all: several hvdruns may write at once.
            with tempfile.NamedTemporaryFile("w", dir=self.folder, delete=False) as file:
                json.dump(value, file)
            os.replace(file.name, path)
            self.used.append(path)

    def forget(self) -> None:
        """What was read or written is not there any more: something went wrong with it."""
        for path in self.used:
            with contextlib.suppress(OSError):
                path.unlink()
        self.used.clear()

    def _path(self, key: object) -> Path | None:
        text = json.dumps(key, sort_keys=True).encode()
        return self.folder and self.folder / hashlib.sha256(text).hexdigest()

    @staticmethod
    def _remove_old(folder: Path) -> None:
        limit = time.time() - LIFETIME_S
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < limit:
                    path.unlink()
