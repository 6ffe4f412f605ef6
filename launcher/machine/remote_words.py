"""A command as one line that every login shell reads alike: sh, bash, zsh, fish, csh, tcsh."""

from __future__ import annotations

import re
from collections.abc import Iterable

# No shell gives these a meaning inside of a word.
_PLAIN = re.compile(r"[A-Za-z0-9_@%+:,./-][A-Za-z0-9_@%+=:,./-]*")


def for_any_shell(words: Iterable[str]) -> str:
    """Words that need quotes go through sh, as octal numbers: shells differ in what quotes mean."""
    words = list(words)
    if all(map(_PLAIN.fullmatch, words)):
        return " ".join(words)
    quoted = " ".join("'" + word.replace("'", "'\\''") + "'" for word in words)
    octal = "".join(f"\\0{byte:03o}" for byte in quoted.encode(errors="surrogateescape"))
    # In sh, printf turns the numbers into the command, and eval runs it.
    return f'sh -c \'eval "exec $(printf %b "{octal}")"\''


def hex_of(command: str) -> str:
    """As an argument that needs no quotes in any shell; `-` if there is no command."""
    return command.encode(errors="surrogateescape").hex() or "-"


def command_of(word: str) -> str:
    return "" if word == "-" else bytes.fromhex(word).decode(errors="surrogateescape")
