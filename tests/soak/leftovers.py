"""What there is on a host beside processes: files, sockets, shared memory of System V, links."""

from __future__ import annotations

from collections.abc import Iterable

from tests.rig.conftest import Rig

# Each line is a thing with a name: 'file /tmp/x', 'unix @name', 'tcp 0A4D0001:7475', …
LOOK = r"""
find /tmp /dev/shm /run -mindepth 1 -not -path "$SHARE*" 2>/dev/null | sed 's/^/file /'
awk 'NR > 1 && NF > 7 {print "unix", $8}' /proc/net/unix
awk 'FNR > 1 && $4 == "0A" {print "tcp", $2}' /proc/net/tcp /proc/net/tcp6
awk 'NR > 1 {print "shm", $2}' /proc/sysvipc/shm
ip -o link | awk '{print "link", $2}'
"""


# What others make once and keep: torch, for its compiler.
KEPT_BY_OTHERS = ("file /tmp/torchinductor_",)


def things(rig: Rig, hosts: Iterable[str]) -> dict[str, set[str]]:
    """By host."""
    found = {}
    for host in hosts:
        lines = rig("exec", host, "env", f"SHARE={rig.share}", "sh", "-c", LOOK).splitlines()
        found[host] = {line for line in lines if not line.startswith(KEPT_BY_OTHERS)}
    return found


def new_things(before: dict[str, set[str]], after: dict[str, set[str]]) -> list[str]:
    return sorted(
        f"{host}: {thing}" for host, found in after.items() for thing in found - before[host]
    )
