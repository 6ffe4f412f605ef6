"""The question that preflight asks a host, and the command that asks it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from glob import glob
from ipaddress import ip_address

from hvdrun.agent.probe import HERE, Question, packed
from hvdrun.machine.remote_words import for_any_shell
from hvdrun.plan.facts import LOOPBACK, LocalFacts, is_local, mpi_name
from hvdrun.plan.flavour import Flavour
from hvdrun.plan.hosts import Host
from hvdrun.plan.job_hosts import hosts_of
from hvdrun.plan.programs import SCRIPT, what_runs
from hvdrun.plan.request import Request, Starter
from hvdrun.plan.ssh import ssh_options
from hvdrun.preflight.findings import PACKAGES


def question_of(request: Request, flavour: Flavour, facts: LocalFacts) -> Question:
    environ = facts.environ
    program = request.command[0] if request.command else facts.python
    return {
        "folders": package_folders(program, environ),
        "packages": list(PACKAGES),
        "mpirun": flavour.mpirun,
        "cwd": facts.cwd,
        "program": program,
        "script": script_of(request.command),
        "path": request.variable("PATH", environ) or os.defpath,
        "visible": request.variable("CUDA_VISIBLE_DEVICES", environ),
        "names": _names(hosts_of(request), facts),
    }


def script_of(command: Sequence[str]) -> str | None:
    """The script, if the command is Python's and runs a file."""
    runs = what_runs(command)
    return runs.name if runs is not None and runs.kind == SCRIPT else None


def package_folders(program: str, environ: Mapping[str, str]) -> list[str]:
    """The package folders of the ranks' Python: the program's environment, or hvdrun's own."""
    found = shutil.which(program, path=environ.get("PATH"))
    if found is not None:
        prefix = os.path.dirname(os.path.dirname(os.path.abspath(found)))
        if prefix != sys.prefix and os.path.exists(f"{prefix}/pyvenv.cfg"):
            return sorted(glob(f"{prefix}/lib/python3*/site-packages"))
    return [os.path.abspath(folder) for folder in sys.path if os.path.isdir(folder)]


def probe_command(
    request: Request, host: Host, facts: LocalFacts, question: Question, by: Starter | None
) -> list[str]:
    remote = [facts.python, "-I", "-S", facts.agent, "host", packed(question)]
    if by is not None:
        return [*by.connection(host.name), *remote]
    login = ["-l", host.user] if host.user else []
    # ssh uses the first port that it gets.
    port = ["-p", str(host.port)] if host.port is not None else []
    words = [*port, *ssh_options(request), *login]
    return ["ssh", "-x", "-T", *words, host.name, for_any_shell(remote)]


def probe_here(facts: LocalFacts) -> list[str]:
    """The command for hvdrun's own machine, which takes part in the test of connections."""
    return [facts.python, "-I", "-S", facts.agent, "host", HERE]


def control_name(hosts: Iterable[Host], facts: LocalFacts) -> str:
    """The name by which mpirun's daemons on other hosts connect to this machine."""
    local = [mpi_name(host, facts) for host in hosts if is_local(host, facts)]
    return local[0] if local and local[0] not in LOOPBACK else facts.hostname


def _names(hosts: Sequence[Host], facts: LocalFacts) -> list[str]:
    """The names that every host must resolve: this machine, and the first host (MASTER_ADDR)."""
    control = control_name(hosts, facts)
    first = hosts[0].name if hosts and hosts[0].name not in LOOPBACK else control
    return [name for name in dict.fromkeys([control, first]) if not _is_address(name)]


def _is_address(name: str) -> bool:
    try:
        ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
