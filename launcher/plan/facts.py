"""Gathers the facts about this machine, cheaply. Nothing else in hvdrun reads them."""

from __future__ import annotations

import glob
import os
import pwd
import socket
import sys

import hvdrun
from hvdrun.errors import UsageError
from hvdrun.machine import shared_memory
from hvdrun.machine.interfaces import interfaces
from hvdrun.machine.resources import gpu_count, physical_cores, temporary_path
from hvdrun.plan.host_facts import SharedMemory, shared_memory_from
from hvdrun.plan.local_facts import LocalFacts
from hvdrun.plan.request import Request
from hvdrun.plan.schedulers import find_starter

# Networks that libfabric's providers serve: InfiniBand and RoCE, Omni-Path, Slingshot.
_FABRICS = ("/sys/class/infiniband", "/sys/class/hfi1", "/sys/class/cxi", "/sys/class/cxi_user")

AMPLE_BYTES = 2 << 30  # of /dev/shm, for hundreds of ranks


def gather(request: Request) -> LocalFacts:
    """Raises UsageError if the working directory has been removed."""
    environ = dict(os.environ)
    path = own_path(os.environ.get("PATH", ""), sys.prefix, sys.base_prefix)
    user, home = own_account()
    temporary = os.path.abspath(temporary_path(environ)[1])
    return LocalFacts(
        environ={"HOME": home, **environ, "PATH": path},
        user=user,
        hosts_path=f"{temporary}/hvdrun-hosts-{os.getpid()}-{os.urandom(8).hex()}",
        path_is_changed=path != os.environ.get("PATH", ""),
        cwd=_working_directory(),
        python=sys.executable,
        agent=os.path.join(os.path.dirname(os.path.abspath(hvdrun.__file__)), "agent", "agent.py"),
        hostname=socket.gethostname(),
        local_names=_local_names(request, environ.get("SLURMD_NODENAME", "")),
        cores=physical_cores(),
        gpus=gpu_count(request.variable("CUDA_VISIBLE_DEVICES", environ)),
        is_root=os.geteuid() == 0,
        has_fabric=any(glob.glob(f"{folder}/*") for folder in _FABRICS),
        master_port=_free_port(),
        starter=find_starter(environ),
        shm=_shared_memory(),
    )


def _shared_memory() -> SharedMemory:
    """Old files are looked for only if space is short: that means a look at all processes."""
    free_bytes, size_bytes = shared_memory.space()
    if free_bytes >= AMPLE_BYTES:
        return SharedMemory(free_bytes, size_bytes)
    return shared_memory_from(shared_memory.facts())


def own_path(path: str, prefix: str, base_prefix: str) -> str:
    """PATH with hvdrun's own folder first, so that `python` is the one that hvdrun is installed in,
    even if its virtual environment is not active (`.venv/bin/hvdrun python train.py`)."""
    path = path or os.defpath  # what the system uses without the variable
    folder = f"{prefix}/bin"
    if prefix == base_prefix or folder in path.split(":"):
        return path
    return f"{folder}:{path}"


def own_account() -> tuple[str, str]:
    """Name and home folder. Open MPI does not start without HOME, which cron and containers may not
    set."""
    try:
        account = pwd.getpwuid(os.getuid())
    except KeyError:  # a number without an account, as in some containers
        return str(os.getuid()), "/"
    return account.pw_name, account.pw_dir


def _working_directory() -> str:
    """The shell's name for it: behind an automounter's links the real path may exist only here."""
    logical = os.environ.get("PWD", "")
    try:
        if os.path.isabs(logical) and os.path.samefile(logical, "."):
            return logical
    except OSError:
        pass
    try:
        return os.getcwd()
    except FileNotFoundError as error:
        raise UsageError("the working directory has been removed: cd to one that exists") from error


def _local_names(request: Request, node: str) -> frozenset[str]:
    """A name that the others know this machine by may be unknown to itself."""
    here = request.allocation.here if request.allocation else ""
    return local_names(node, hosts_file()) | ({here.lower()} if here else set())


def local_names(node: str, hosts_file: str) -> frozenset[str]:
    """This host's names and addresses, without asking a name server. `node`: its name in Slurm;
    `hosts_file`: the content of /etc/hosts."""
    name = socket.gethostname().lower()
    names = {"localhost", node.lower()} - {""}
    names |= {"127.0.0.1", "::1", *(str(found["address"]) for found in interfaces())}
    others: set[str] = set()
    for line in hosts_file.splitlines():
        address, *aliases = line.partition("#")[0].lower().split() or [""]
        if address in names or address.startswith("127."):
            names |= {address, *aliases}
        else:
            others.update(aliases)
    # In a host list, its own name may mean another machine: -H server2 is where ssh would go.
    return frozenset(names | ({name, name.partition(".")[0]} - others))


def hosts_file() -> str:
    try:
        with open("/etc/hosts", encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])
