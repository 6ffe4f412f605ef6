"""A command on its way to a host: as one line that every login shell reads alike (sh, bash, zsh,
fish, csh, tcsh), and as arguments of the agent beside a rank."""

from __future__ import annotations

import re
from collections.abc import Iterable

# The agent's roles beside a rank (see agent.rank.spawn.bind).
BOUND, VERBOSE, UNBOUND = ("rank", "verbose-rank", "unbound-rank")
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


def escape(command: tuple[str, ...]) -> list[str]:
    """The command as arguments for mpirun, for which ':' separates two programs."""
    return ["\\" + word if word == ":" or word.startswith("\\") else word for word in command]


def unescape(arguments: list[str]) -> list[str]:
    return [word[1:] if word.startswith("\\") else word for word in arguments]
