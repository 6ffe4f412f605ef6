"""What a host's login shell did in place of hvdrun's program, or to it. Pure."""

from __future__ import annotations

import re

from hvdrun.errors import HostSetupError
from hvdrun.preflight.ask_hosts import Reply
from hvdrun.preflight.findings import Finding
from hvdrun.ssh_errors import LOGIN, last_words

_NO_PROGRAM = (126, 127)  # a shell's exit codes for a program that it can't run


def is_python(reply: Reply, python: str, agent: str) -> bool:
    """Whether the interpreter failed, or is not there: its name or its program's is in the
    message."""
    code = reply.exit_code or 0
    named = any(path in reply.stderr for path in (python, agent))
    return (
        code in _NO_PROGRAM
        or code > 128
        or named
        or bool(re.search(r"(?m)^(Fatal Python error|Traceback )", reply.stderr))
    )


def ran_something_else(host: str, login: str, reply: Reply) -> Finding:
    """The remote command ended without a word of hvdrun's program."""
    words = last_words(reply.stderr) or last_words(reply.stdout)
    printed = f"it printed: {words}" if words else "it printed nothing"
    return Finding(
        host,
        "login shell",
        f"the login there ended with exit code {reply.exit_code}, and hvdrun's program did not"
        f" start: {printed}",
        LOGIN.format(login=login),
        HostSetupError,
    )


def reads_input(host: str, reply: Reply) -> Finding:
    return Finding(
        host,
        "login shell",
        f"hvdrun's program started only when its input ended, after {reply.took_s:.0f} s: a"
        " start-up file there reads standard input to its end",
        f"on {host}, begin ~/.bashrc or what your shell reads with a line that returns if the"
        " shell is not interactive: `case $- in *i*) ;; *) return ;; esac`",
        HostSetupError,
    )
