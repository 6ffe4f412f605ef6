"""Why a host has not answered: ssh, its login shell, or its Python. Pure."""

from __future__ import annotations

from hvdrun.errors import HostSetupError, SshFailed
from hvdrun.plan.schedulers import trouble
from hvdrun.preflight import login_shell
from hvdrun.preflight.ask_hosts import Reply
from hvdrun.preflight.findings import Finding
from hvdrun.ssh_errors import OTHER, SLOW, last_words

SSH_ERROR = 255  # ssh's own exit code; all others are the remote command's


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
    why = trouble(reply.stderr)
    if why.way != "ssh" or reply.exit_code in (SSH_ERROR, None):
        found = SLOW if reply.exit_code is None else why
        remedy = found.remedy.format(host=host, login=login, limit_s=limit_s)
        cause = found.cause.format(limit_s=limit_s)
        text = f"{cause} ({words})" if words else cause
        if found is OTHER and not words:
            text = f"ssh ended with exit code {reply.exit_code} and printed nothing"
        return Finding(host, why.way, text, remedy, SshFailed)
    if by_login and not login_shell.is_python(reply, python, agent):
        return login_shell.ran_something_else(host, login, reply)
    said = words or last_words(reply.stdout) or "it printed nothing"
    text = f"{python} does not run there: {said} (exit code {reply.exit_code})"
    return Finding(host, "Python", text, install, HostSetupError)
