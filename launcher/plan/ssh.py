"""How hvdrun and mpirun reach other hosts: our agent in ssh's place, with options for ssh, or the
scheduler's program. Pure functions."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from hvdrun.machine.environment import AGENT, HOSTS, PYTHON, REACH, SSH
from hvdrun.plan.facts import LocalFacts
from hvdrun.plan.hosts import Host
from hvdrun.plan.request import Request, Starter

# How long ssh may take to connect; during a job, at least as long as a host may be silent.
CONNECT_S = 10
# ssh ends a connection after more than so many of its own signs of life without an answer.
UNANSWERED = 2


def has_blanks(facts: LocalFacts) -> bool:
    return " " in facts.python + facts.agent


def ssh_agent(facts: LocalFacts) -> tuple[str, str]:
    """The program in ssh's place, and its arguments, which MPIs split at each blank."""
    if not has_blanks(facts):
        return facts.python, f"-I -S {facts.agent} ssh"
    script = f'exec "${PYTHON}" -I -S "${AGENT}" ssh "$@"'.replace(" ", "\t")
    return "/bin/sh", f"-c {script} hvdrun"


def reached_by(request: Request, facts: LocalFacts, hosts: Sequence[Host]) -> Starter | None:
    """The scheduler's program that reaches these hosts in ssh's place: all of them belong to its
    allocation, and the user has set nothing for ssh. None: ssh reaches them."""
    allocation = request.allocation
    if allocation is None:
        return None
    if allocation.reach is not None:  # there is no other way
        return allocation.reach
    starter = facts.starter
    if starter is None or request.ssh_port is not None or request.ssh_identity_file is not None:
        return None
    ours = {host.name for host in allocation.hosts}
    if allocation.scheduler != starter.scheduler or not all(
        host.name in ours and host.user is None and host.port is None for host in hosts
    ):
        return None
    return starter


def connection_variables(
    request: Request, facts: LocalFacts, hosts: Sequence[Host], known: str
) -> dict[str, str]:
    """hosts: those that are not this machine; known: the value of HOSTS."""
    variables = {HOSTS: known} if known else {}
    if starter := reached_by(request, facts, hosts):
        reach = shlex.join(starter.connection("{host}"))
        return {**variables, REACH: reach, **starter.variables}
    connect_s = max(CONNECT_S, math.ceil(request.host_timeout_s))
    return {**variables, SSH: shlex.join(ssh_options(request, connect_s))}


def about_host(name_for_mpi: str, host: Host) -> str:
    """What the agent in ssh's place needs to know of the host; no word has a blank or a comma."""
    user = () if host.user is None else ("-l", host.user)
    port = () if host.port is None else ("-p", str(host.port))
    return " ".join((name_for_mpi, *user, *port, host.name))


def ssh_options(request: Request, connect_s: int = CONNECT_S) -> list[str]:
    """ssh asks nothing and never hangs. It gives up a silent host just after hvdrun would: it is
    there for the time before the host agent runs, and while nobody reads hvdrun's output."""
    every_s = math.ceil((request.host_timeout_s + 1) / (UNANSWERED + 1))
    settings = (
        "BatchMode=yes",
        f"ConnectTimeout={connect_s}",
        f"ServerAliveInterval={every_s}",
        f"ServerAliveCountMax={UNANSWERED}",
        # The user's forwardings are for the user's own sessions, and their ports may be in use.
        "ClearAllForwardings=yes",
        # So are a terminal, which would change the bytes, and a command in place of hvdrun's.
        "RequestTTY=no",
        "RemoteCommand=none",
    )
    options = [word for setting in settings for word in ("-o", setting)]
    if request.ssh_port is not None:
        options += ["-p", str(request.ssh_port)]
    if request.ssh_identity_file is not None:
        options += ["-i", request.ssh_identity_file]
    return options
