"""What comes of a command that asks a host: its answer, or why there is none: ssh, its login shell,
or its Python. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from hvdrun.agent.frames import SSH_FAILED
from hvdrun.errors import HostSetupError, SshFailed
from hvdrun.plan.schedulers import trouble
from hvdrun.preflight.findings import Finding
from hvdrun.ssh_errors import LOGIN, OTHER, SLOW, Trouble, last_words

_NO_PROGRAM = (126, 127)  # a shell's exit codes for a program that it can't run


@dataclass(frozen=True)
class Reply:
    """The result of one command."""

    answer: dict[str, Any] | None
    exit_code: int | None  # None: hvdrun has ended it at the time limit, or it goes on
    stderr: str
    took_s: float
    clock_skew_s: float = 0.0  # how far the host's clock is outside of the call's begin and end
    stdout: str = ""  # its end, if there is no answer
    came_at_the_end: bool = False  # the answer, soon after the end of the command's input


def no_answer(
    host: str,
    login: str,
    reply: Reply,
    limit_s: float,
    python: str,
    agent: str,
    by_login: bool = True,
) -> Finding:
    """`login` is what the user types after ssh; `python` and `agent` are the program that was to
    answer; `by_login`: a login shell was to start it."""
    install = (
        f"every host needs the same installation at the same place: install it on {host}, or share"
        " the folder"
    )
    if reply.answer is not None:
        text = "another version of hvdrun answers there"
        return Finding(host, "hvdlite", text, install, HostSetupError)
    words = last_words(reply.stderr)
    found = trouble_of(reply)
    if found is not None:
        remedy = found.remedy.format(host=host, login=login, limit_s=limit_s)
        cause = found.cause.format(limit_s=limit_s)
        text = f"{cause} ({words})" if words else cause
        if found is OTHER and not words:
            text = f"ssh ended with exit code {reply.exit_code} and printed nothing"
        return Finding(host, trouble(reply.stderr).way, text, remedy, SshFailed)
    if by_login and not _is_python(reply, python, agent):
        return _ran_something_else(host, login, reply)
    said = words or last_words(reply.stdout) or "it printed nothing"
    text = f"{python} does not run there: {said} (exit code {reply.exit_code})"
    return Finding(host, "Python", text, install, HostSetupError)


def with_own_name(finding: Finding, hostname: str) -> Finding:
    """The same, where ssh was to go to a host that has this machine's own name."""
    own = hostname.lower()
    if finding.host.lower() not in (own, own.partition(".")[0]):
        return finding
    return replace(
        finding,
        remedy=f"{finding.host} is this machine's own name, but /etc/hosts gives it an address that"
        " this machine has not: correct that line, or list this machine by its address; if another"
        f" machine is meant, {finding.remedy}",
    )


def trouble_of(reply: Reply) -> Trouble | None:
    """Why ssh, or the program in its place, has not reached the host, or not in time; None: it has,
    and what it started there has failed."""
    why = trouble(reply.stderr)
    if why.way == "ssh" and reply.exit_code not in (SSH_FAILED, None):
        return None
    return SLOW if reply.exit_code is None else why


def _is_python(reply: Reply, python: str, agent: str) -> bool:
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


def _ran_something_else(host: str, login: str, reply: Reply) -> Finding:
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
