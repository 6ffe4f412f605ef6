"""What hvdrun finds out about this machine, cheaply. The only place where it looks."""

from __future__ import annotations

import glob
import os
import socket
import sys

from .command import Facts
from .machine import gpu_count, physical_cores
from .slurm import find_srun

# Networks that libfabric's providers serve: InfiniBand and RoCE, Omni-Path, Slingshot.
_FABRICS = ("/sys/class/infiniband", "/sys/class/hfi1", "/sys/class/cxi", "/sys/class/cxi_user")


def gather() -> Facts:
    environ = dict(os.environ)
    path = own_path(os.environ.get("PATH", ""), sys.prefix, sys.base_prefix)
    return Facts(
        environ={"HOME": own_home(), **environ, "PATH": path},
        path_is_changed=path != os.environ.get("PATH", ""),
        cwd=_working_directory(),
        python=sys.executable,
        agent=os.path.join(os.path.dirname(os.path.abspath(__file__)), "agent.py"),
        hostname=socket.gethostname(),
        local_names=local_names(environ.get("SLURMD_NODENAME")),
        cores=physical_cores(),
        gpus=gpu_count(os.environ.get("CUDA_VISIBLE_DEVICES")),
        is_root=os.geteuid() == 0,
        has_fabric=any(glob.glob(f"{folder}/*") for folder in _FABRICS),
        master_port=_free_port(),
        srun=find_srun(environ),
    )


def own_path(path: str, prefix: str, base_prefix: str) -> str:
    """PATH, in which `python` is the one that hvdrun was installed with, also where its virtual
    environment is not active (`.venv/bin/hvdrun python train.py`)."""
    folder = f"{prefix}/bin"
    if prefix == base_prefix or folder in path.split(":"):
        return path
    return f"{folder}:{path}" if path else folder


def own_home() -> str:
    """Without the variable, as cron or a container may start us, Open MPI does not start."""
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # a number that no user has, as containers are run with
        return "/"


def _working_directory() -> str:
    """As the shell calls it: behind an automounter's links the real path can be this host's."""
    logical = os.environ.get("PWD", "")
    try:
        if os.path.isabs(logical) and os.path.samefile(logical, "."):
            return logical
    except OSError:
        pass
    return os.getcwd()


def local_names(node: str | None = None) -> frozenset[str]:
    """`node`: what Slurm calls this host."""
    name = socket.gethostname().lower()
    names = {"localhost", "127.0.0.1", "::1", name, name.partition(".")[0]}
    return frozenset(names | {node.lower()} if node else names)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])
