"""Host lists: `-H h1:4,h2:4` and hostfiles, and which host gets how many ranks. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from .errors import HostListError, TooManyProcesses

# Also what keeps a host name from being an option or a command for ssh.
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@\\-]*")
_IPV6 = re.compile(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[A-Za-z0-9_.-]+)?")


@dataclass(frozen=True)
class Host:
    name: str  # without the brackets of an IPv6 address
    slots: int | None = None  # None: the user gave no number
    user: str | None = None


@dataclass(frozen=True)
class Share:
    """The ranks of one host: `count` in a row, after those of the hosts before it."""

    host: Host
    count: int


def parse_hosts(text: str) -> tuple[Host, ...]:
    """`-H`: entries with commas between them."""
    hosts = []
    for position, entry in enumerate(text.split(","), 1):
        where = f"-H, entry {position} ({entry.strip()!r})"
        if not entry.strip():
            raise HostListError(
                f"{where}: it is empty; write the hosts as in -H server1:4,server2:4"
            )
        hosts.append(_parse_host(entry.strip(), where))
    return merge(hosts)


def parse_hostfile(text: str, path: str) -> tuple[Host, ...]:
    """One host a line, in Open MPI's form (`host slots=4 max_slots=8`) or MPICH's (`host:4`)."""
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        line = re.sub(r"\s*=\s*", "=", line.partition("#")[0].strip())
        if not line:
            continue
        entry, *options = line.split()
        where = f"{path}:{number}"
        host = _parse_host(entry, where)
        limit = None
        for option in options:
            key, sign, value = option.partition("=")
            key = key.replace("-", "_").lower()
            if key not in ("slots", "max_slots", "user") or not sign:
                raise HostListError(
                    f"{where}: {option!r} is not understood; a line is 'host', 'host:4' or"
                    " 'host slots=4 max_slots=8'"
                )
            if key == "user":
                host = replace(host, user=_parse_user(value, where))
            elif key == "max_slots":
                limit = _parse_slots(value, where)
            elif host.slots is not None:
                raise HostListError(f"{where}: the slots are given twice; leave one of them out")
            else:
                host = replace(host, slots=_parse_slots(value, where))
        if limit is not None and host.slots is not None and host.slots > limit:
            raise HostListError(
                f"{where}: slots={host.slots} is more than max_slots={limit}; lower the first"
            )
        if limit is not None and host.slots is None:
            host = replace(host, slots=limit)
        hosts.append(host)
    if not hosts:
        raise HostListError(f"{path}: it names no host; write one a line, as in 'server1 slots=4'")
    return merge(hosts)


def _parse_host(entry: str, where: str) -> Host:
    user, at, rest = entry.rpartition("@")
    if rest.startswith("["):
        name, bracket, rest = rest[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise HostListError(f"{where}: expected '[ADDRESS]' or '[ADDRESS]:SLOTS'")
        if not _IPV6.fullmatch(name):
            raise HostListError(f"{where}: {name!r} is no IPv6 address")
        colon, slots = rest[:1], rest[1:]
    else:
        name, colon, slots = rest.partition(":")
        if ":" in slots:
            raise HostListError(
                f"{where}: more than one ':'; put an IPv6 address into brackets, as in [fd00::1]:4"
            )
        if not _NAME.fullmatch(name):
            raise HostListError(f"{where}: {name!r} is no host name; write it as in 'server1:4'")
    return Host(
        name,
        _parse_slots(slots, where) if colon else None,
        _parse_user(user, where) if at else None,
    )


def _parse_slots(text: str, where: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text) or not int(text):
        raise HostListError(
            f"{where}: the slots must be a whole number above 0, not {text!r}; as in 'server1:4'"
        )
    return int(text)


def _parse_user(text: str, where: str) -> str:
    if not _USER.fullmatch(text):
        raise HostListError(f"{where}: {text!r} is no user name; write it as in 'user@server1:4'")
    return text


def merge(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """A host that is named twice has the slots of both."""
    merged: dict[tuple[str, str | None], Host] = {}
    for host in hosts:
        key = (host.name, host.user)
        known = merged.get(key)
        if known is not None and (known.slots is not None or host.slots is not None):
            host = replace(host, slots=(known.slots or 1) + (host.slots or 1))
        merged[key] = host
    return tuple(merged.values())


def place(
    hosts: Sequence[Host], num_proc: int | None, default_slots: Callable[[Host], int]
) -> tuple[Share, ...]:
    """Ranks host by host: each host is filled before the next. Without num_proc, all slots.

    Where every number is the user's, more processes than slots are an error; a host whose slots
    are only a guess takes more than them.
    """
    slots = [default_slots(h) if h.slots is None else h.slots for h in hosts]
    wanted = sum(slots) if num_proc is None else num_proc
    counts = []
    left = wanted
    for available in slots:
        counts.append(min(available, left))
        left -= counts[-1]
    if left:
        guessed = [i for i, host in enumerate(hosts) if host.slots is None]
        if not guessed:
            given = ", ".join(f"{h.name}:{h.slots}" for h in hosts)
            raise TooManyProcesses(
                f"-np {wanted} asks for more processes than the {sum(slots)} slots of {given};"
                f" lower -np, or give more slots, as in -H {hosts[0].name}:{wanted}"
            )
        for turn in range(left):
            counts[guessed[turn % len(guessed)]] += 1
    return tuple(Share(host, count) for host, count in zip(hosts, counts, strict=True) if count)
