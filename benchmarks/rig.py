"""Several hosts on this machine (tests/cluster): network namespaces whose links can be shaped.

All of them compute on this machine's cores, which also carry both ends of every link.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.plan import Place

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 60.0
TOOLS = {"sshd": "openssh-server", "ip": "iproute2", "tc": "iproute2"}


def lacking() -> str:
    """The reason why there can be no rig here; empty if there can."""
    if os.geteuid():
        return "the rig of several hosts needs root"
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    for tool, package in TOOLS.items():
        if not shutil.which(tool, path=path):
            return f"the rig of several hosts needs {tool}: apt-get install {package}"
    return ""


def shared_with_hosts(*folders: Path) -> list[str | Path]:
    """cluster's options: of these, the hosts see those in folders of their own only if told so."""
    own = (Path("/tmp"), Path("/dev/shm"), Path("/run"))
    below = [folder for folder in folders if any(path in folder.resolve().parents for path in own)]
    return [word for folder in below for word in ("--share", folder)]


class Rig:
    """Hosts that are up: server1, server2, …"""

    def __init__(self, state: Path, hosts: int) -> None:
        self._environment = {**os.environ, "CLUSTER_DIR": str(state)}
        self._hosts = hosts

    def cluster(self, *words: str | Path) -> None:
        subprocess.run(
            [ROOT / "tests" / "cluster", *words],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            check=True,
            timeout=LIMIT_S,
        )

    def shape(self, rate: str) -> None:
        """Gives every host's link this bit rate, each way; "": none."""
        for number in range(1, self._hosts + 1):
            self.cluster("slow", f"server{number}", *(("--rate", rate) if rate else ()))

    def command(self, place: Place, command: Sequence[str]) -> list[str]:
        """An hvdrun command line as one that runs on the place's hosts, from the first of them."""
        return self.command_on([place.ranks] * place.hosts, command)

    def command_on(self, ranks: Sequence[int], command: Sequence[str]) -> list[str]:
        """The same, with so many ranks on each host."""
        where = ",".join(f"server{number + 1}:{count}" for number, count in enumerate(ranks))
        hvdrun, *rest = command
        return self.inside(0, [hvdrun, "-H", where, *rest])

    def inside(self, number: int, command: Sequence[str]) -> list[str]:
        """A command line as one that runs on one of the hosts, the first of which is 0."""
        folder = f"CLUSTER_DIR={self._environment['CLUSTER_DIR']}"
        cluster = str(ROOT / "tests" / "cluster")
        return ["env", folder, cluster, "exec", f"server{number + 1}", "--", *command]

    def signal_sshd(self, name: str) -> None:
        """STOP: the hosts' ssh servers answer nobody; CONT: they do again."""
        for number in range(self._hosts):
            subprocess.run(self.inside(number, ["pkill", f"-{name}", "-x", "sshd"]), check=True)


@contextmanager
def rig(folder: Path, hosts: int) -> Iterator[Rig]:
    """The hosts are up, and see `folder` as this machine does; afterwards they are gone."""
    found = Rig(folder / "cluster", hosts)
    share = folder / "share"
    share.mkdir()
    try:
        found.cluster("up", str(hosts), *shared_with_hosts(share, ROOT))
        yield found
    finally:
        found.cluster("down")
