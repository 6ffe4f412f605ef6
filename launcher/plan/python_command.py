"""What a Python command runs: a script, a module, code, or its standard input."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

SCRIPT, MODULE, CODE, STDIN = "script", "module", "code", "stdin"
_PYTHON = r"(python|pypy)[\d.]*"
_STDIN_FILES = ("/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")


class Runs(NamedTuple):
    kind: str
    name: str  # of the script or module
    arguments: tuple[str, ...] = ()


def what_runs(command: Sequence[str]) -> Runs | None:
    """None if the command is not Python's, or only prints something, as `python --version`."""
    if not command or not re.fullmatch(_PYTHON, os.path.basename(command[0])):
        return None
    words = list(command[1:])
    while words:
        word = words.pop(0)
        if word == "-":
            return Runs(STDIN, word, tuple(words))
        if not word.startswith("-"):
            return Runs(STDIN if word in _STDIN_FILES else SCRIPT, word, tuple(words))
        if word.startswith("--"):
            if word != "--check-hash-based-pycs":
                return None  # --help, --version
            del words[:1]
            continue
        for at, letter in enumerate(word[1:], 2):
            if letter in "hV?":
                return None
            if letter in "cmWX":
                value = word[at:] or (words.pop(0) if words else "")
                if letter in "cm":
                    return Runs(CODE if letter == "c" else MODULE, value, tuple(words))
                break
    return Runs(STDIN, "", ())
