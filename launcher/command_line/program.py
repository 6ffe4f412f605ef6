"""Which program a name means, and a script that is named without `python`: the commonest mistake in
a first command."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence

from hvdrun.errors import CommandNotFound


def which(command: Sequence[str], path: str, shells_path: str) -> str:
    """For --verbose: what the name means to ranks with that PATH, and to the shell if that differs;
    "" for a path."""
    name = command[0]
    found = shutil.which(name, path=path)
    if "/" in name or found is None:
        return ""
    shells = shutil.which(name, path=shells_path)
    differs = f"; your shell's is {shells}" if shells else ""
    return f"{name} is {found}" + (differs if shells != found else "")


def check(command: Sequence[str], cwd: str, path: str) -> None:
    """For ranks that run on this machine, in `cwd` and with that PATH.

    Raises CommandNotFound if they could not run the script by itself.
    """
    name = command[0]
    file = os.path.join(cwd, name)
    if not name.endswith(".py") or not os.path.isfile(file):
        return
    if "/" not in name:
        if shutil.which(name, path=path):
            return
        why = "it is not in PATH"
    elif not os.access(file, os.X_OK):
        why = "it is not executable"
    elif not _has_interpreter(file):
        why = "it has no #! line"
    else:
        return
    meant = shlex.join(["python", name.removeprefix("./"), *command[1:]])
    raise CommandNotFound(f"{name!r} can't run by itself: {why}; did you mean `hvdrun … {meant}`?")


def _has_interpreter(file: str) -> bool:
    try:
        with open(file, "rb") as script:
            return script.read(2) == b"#!"
    except OSError:
        return True
