"""A real Slurm on the hosts of the rig: slurmctld on server1, a slurmd and a munged on each host.

All that it writes lies in the hosts' own /run and /etc, which end with them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from tests.rig.conftest import Rig

CPUS = 4  # of a host, as Slurm is told: its tasks share this machine's cores
TOOLS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "munged": "munge",
}
DAEMONS = {"slurmctld", "slurmscriptd", "slurmd", "munged"}
# The plugin for Open MPI's ranks loads this library by the name that only the -dev package has.
PMIX = "libpmix.so"

CONF = """\
ClusterName=rig
SlurmctldHost=server1
SlurmUser=root
AuthInfo=socket=/run/munge.socket
StateSaveLocation=/run/slurm/state
SlurmdSpoolDir=/run/slurm/spool
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
SlurmctldLogFile=/run/slurm/slurmctld.log
SlurmdLogFile=/run/slurm/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SlurmdParameters=config_overrides
ReturnToService=2
"""


def lacking() -> str:
    """Why there can be no Slurm here; empty if there can."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    for tool, package in TOOLS.items():
        if not shutil.which(tool, path=path):
            return f"the tests of Slurm need {tool}: apt-get install {package}"
    if not list(Path("/usr/lib").glob(f"*/{PMIX}")):
        return f"the tests of Slurm need {PMIX}: apt-get install libpmix-dev"
    return ""


@contextlib.contextmanager
def slurm(rig: Rig, hosts: int) -> Iterator[Path]:
    """Runs Slurm on server1 … serverN; gives the path of its slurm.conf, which all hosts see."""
    conf, key = rig.share / "slurm.conf", rig.share / "munge.key"
    conf.write_text(
        f"{CONF}NodeName=server[1-{hosts}] CPUs={CPUS}\n"
        "PartitionName=all Nodes=ALL Default=YES OverSubscribe=NO\n"
    )
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    names = [f"server{number + 1}" for number in range(hosts)]
    munged = " ".join(
        f"--{what}=/run/munge.{what.partition('-')[0]}"
        for what in ("socket", "pid-file", "log-file", "seed-file")
    )
    rig.services |= DAEMONS
    try:
        for name in names:
            _daemon(rig, name, "mkdir -p /run/slurm/spool /run/slurm/state")
            _daemon(rig, name, f"munged --force --key-file={key} {munged}")
        _daemon(rig, "server1", f"slurmctld -f {conf}")
        for name in names:
            _daemon(rig, name, f"slurmd -f {conf} -N {name}")
        wait_until_idle(rig, conf, hosts)
        yield conf
    finally:
        rig.services -= DAEMONS
        for name in names:
            # Each by its own file: nothing else on the machine is called on to end.
            for pid_file in ("slurm/slurmd", "slurm/slurmctld", "munge"):
                _daemon(
                    rig, name, f"test ! -e /run/{pid_file}.pid || kill $(cat /run/{pid_file}.pid)"
                )


def _daemon(rig: Rig, host: str, command: str) -> None:
    """It goes into the background by itself, and holds none of our pipes there."""
    path = "PATH=$PATH:/usr/sbin:/sbin"
    rig("exec", host, "--", "sh", "-c", f"{path}; {command} </dev/null >/dev/null 2>&1")


def wait_until_idle(rig: Rig, conf: Path, hosts: int) -> None:
    """Until no host is missing, and no job is left on any."""
    deadline = time.monotonic() + 60
    states = ""
    while time.monotonic() < deadline:
        sinfo = ["env", f"SLURM_CONF={conf}", "sinfo", "--noheader", "--format=%D %t"]
        states = rig("exec", "server1", "--", "sh", "-c", '"$@" 2>&1 || true', "sh", *sinfo)
        if states.split() == [str(hosts), "idle"]:
            return
        time.sleep(0.1)
    raise AssertionError(f"Slurm did not come up: {states}")
