"""What hvdrun finds out about this machine, cheaply. The only place where it looks."""

from __future__ import annotations

import glob
import os
import socket
import sys

import hvdrun
from hvdrun.errors import UsageError
from hvdrun.machine.interfaces import interfaces
from hvdrun.machine.resources import gpu_count, physical_cores
from hvdrun.plan.command import LocalFacts
from hvdrun.plan.request import Request
from hvdrun.plan.slurm import find_srun

# Networks that libfabric's providers serve: InfiniBand and RoCE, Omni-Path, Slingshot.
_FABRICS = ("/sys/class/infiniband", "/sys/class/hfi1", "/sys/class/cxi", "/sys/class/cxi_user")


def gather(request: Request) -> LocalFacts:
    """Raises UsageError where the working directory is not there any more."""
    environ = dict(os.environ)
    path = own_path(os.environ.get("PATH", ""), sys.prefix, sys.base_prefix)
    user, home = own_account()
    return LocalFacts(
        environ={"HOME": home, **environ, "PATH": path},
        user=user,
        path_is_changed=path != os.environ.get("PATH", ""),
        cwd=_working_directory(),
        python=sys.executable,
        agent=os.path.join(os.path.dirname(os.path.abspath(hvdrun.__file__)), "agent", "agent.py"),
        hostname=socket.gethostname(),
        local_names=local_names(environ.get("SLURMD_NODENAME", ""), _hosts_file()),
        cores=physical_cores(),
        gpus=gpu_count(request.variable("CUDA_VISIBLE_DEVICES", environ)),
        is_root=os.geteuid() == 0,
        has_fabric=any(glob.glob(f"{folder}/*") for folder in _FABRICS),
        master_port=_free_port(),
        srun=find_srun(environ),
    )


def own_path(path: str, prefix: str, base_prefix: str) -> str:
    """PATH, in which `python` is the one that hvdrun was installed with, also where its virtual
    environment is not active (`.venv/bin/hvdrun python train.py`)."""
    path = path or os.defpath  # what holds without the variable
    folder = f"{prefix}/bin"
    if prefix == base_prefix or folder in path.split(":"):
        return path
    return f"{folder}:{path}"


def own_account() -> tuple[str, str]:
    """Name and home. Without a variable for the latter, as cron or a container may start us, Open
    MPI does not start."""
    import pwd

    try:
        account = pwd.getpwuid(os.getuid())
    except KeyError:  # a number that no user has, as containers are run with
        return str(os.getuid()), "/"
    return account.pw_name, account.pw_dir


def _working_directory() -> str:
    """As the shell calls it: behind an automounter's links the real path can be this host's."""
    logical = os.environ.get("PWD", "")
    try:
        if os.path.isabs(logical) and os.path.samefile(logical, "."):
            return logical
    except OSError:
        pass
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise UsageError(
            "the working directory has been removed: cd to one that is there"
        ) from error


def local_names(node: str, hosts_file: str) -> frozenset[str]:
    """This host's names and addresses, as far as no name server is needed. `node`: what Slurm
    calls it; `hosts_file`: what stands in /etc/hosts."""
    name = socket.gethostname().lower()
    names = {"localhost", name, name.partition(".")[0], node.lower()} - {""}
    names |= {"127.0.0.1", "::1", *(str(found["address"]) for found in interfaces())}
    for line in hosts_file.splitlines():
        address, *aliases = line.partition("#")[0].lower().split() or [""]
        if address in names or address.startswith("127."):
            names |= {address, *aliases}
    return frozenset(names)


def _hosts_file() -> str:
    try:
        with open("/etc/hosts", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])
