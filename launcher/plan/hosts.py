"""Host lists: `-H h1:4,h2:4` and hostfiles, and which host gets how many ranks. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv6Address
from typing import Any

from hvdrun.errors import HostListError, TooManyProcesses

# Also keeps ssh from taking a host name for an option or a command.
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@\\-]*")
_ZONE = re.compile(r"[A-Za-z0-9_.-]+")  # of an IPv6 address: the interface


_FORMS = "'server1', 'server1:4', 'server1 slots=4 max_slots=8', with user=ann or port=2222"
_KEYS = ("slots", "max_slots", "user", "port")
# The MPIs' other spellings, after '-' has become '_'.
_ALIASES = {"slots_max": "max_slots", "username": "user", "user_name": "user"}


@dataclass(frozen=True)
class Host:
    name: str  # without the brackets of an IPv6 address
    slots: int | None = None  # None: neither the user nor a scheduler gave a number
    user: str | None = None
    port: int | None = None  # ssh's
    max_slots: int | None = None  # more ranks than this are an error
    cpus: int | None = None  # that the scheduler's job has there


@dataclass(frozen=True)
class Share:
    """The ranks of one host: `count` in a row, after those of the hosts before it."""

    host: Host
    count: int


def parse_hosts(text: str, source: str = "-H") -> tuple[Host, ...]:
    """Entries with commas between them; errors name `source`."""
    hosts = []
    for position, entry in enumerate(text.split(","), 1):
        where = f"{source}, entry {position} ({entry.strip()!r})"
        if not entry.strip():
            raise HostListError(f"{where}: it is empty; write the hosts as in server1:4,server2:4")
        if re.search(r"[\s;]", entry.strip()):
            raise HostListError(
                f"{where}: put nothing but a comma between two hosts, as in server1:4,server2:4"
            )
        hosts.append((parse_host(entry.strip(), where), where))
    return merge(hosts)


def parse_hostfile(text: str, path: str) -> tuple[Host, ...]:
    """One host per line, in Open MPI's form (`host slots=4 max_slots=8`) or MPICH's (`host:4`)."""
    hosts = []
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        line = re.sub(r"\s*=\s*", "=", line.partition("#")[0].strip())
        if line:
            where = f"{path}:{number}"
            if "," in line:
                raise HostListError(f"{where}: {line!r} has a comma; write one host per line")
            hosts.append((_parse_line(line.split(), where), where))
    if not hosts:
        raise HostListError(
            f"{path}: it names no host; write one per line, as in 'server1 slots=4'"
        )
    return merge(hosts)


def _parse_line(words: list[str], where: str) -> Host:
    host = parse_host(words[0], where)
    given = {"slots"} if host.slots is not None else set()
    given |= {"user"} if host.user is not None else set()
    for option in words[1:]:
        key, sign, value = option.partition("=")
        key = key.replace("-", "_").lower()
        key = _ALIASES.get(key, key)
        if key not in _KEYS or not sign:
            raise HostListError(
                f"{where}: {option!r} is not a setting of a host; a line has the form {_FORMS}"
            )
        if key in given:
            what = "the slots are" if key == "slots" else f"{key} is"
            raise HostListError(f"{where}: {what} given twice; leave one of them out")
        given.add(key)
        parse = {"user": _parse_user, "port": _parse_port}.get(key, parse_slots)
        values: dict[str, Any] = {key: parse(value, where)}
        host = replace(host, **values)
    slots, most = host.slots, host.max_slots
    if slots is not None and most is not None and slots > most:
        raise HostListError(f"{where}: slots={slots} is more than max_slots={most}; lower slots")
    return host


def parse_host(entry: str, where: str) -> Host:
    user, at, rest = entry.rpartition("@")
    if rest.startswith("["):
        name, bracket, rest = rest[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise HostListError(f"{where}: expected '[ADDRESS]' or '[ADDRESS]:SLOTS'")
        name = _ipv6(name, where)
        colon, slots = rest[:1], rest[1:]
    else:
        name, colon, slots = rest.partition(":")
        if ":" in slots:
            raise HostListError(
                f"{where}: more than one ':'; put an IPv6 address into brackets, as in [fd00::1]:4"
            )
        if not _NAME.fullmatch(name):
            raise HostListError(f"{where}: {name!r} is not a host name; write it as in 'server1:4'")
    return Host(
        name, parse_slots(slots, where) if colon else None, _parse_user(user, where) if at else None
    )


def _ipv6(text: str, where: str) -> str:
    """In its short form, so that equal addresses are the same host."""
    address, percent, zone = text.partition("%")
    try:
        short = str(IPv6Address(address))
    except ValueError:
        short = ""
    if not short or (percent and not _ZONE.fullmatch(zone)):
        raise HostListError(f"{where}: {text!r} is not an IPv6 address")
    return short + percent + zone


def parse_slots(text: str, where: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text) or not int(text):
        raise HostListError(
            f"{where}: the slots must be a whole number above 0, not {text!r}; as in 'server1:4'"
        )
    return int(text)


def _parse_user(text: str, where: str) -> str:
    if not _USER.fullmatch(text):
        raise HostListError(
            f"{where}: {text!r} is not a user name; write it as in 'user@server1:4'"
        )
    return text


def _parse_port(text: str, where: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 0 < int(text) < 65536:
        raise HostListError(
            f"{where}: {text!r} is not a port; expected 1 to 65535, as in 'port=2222'"
        )
    return int(text)


def merge(hosts: Iterable[tuple[Host, str]]) -> tuple[Host, ...]:
    """Adds up the slots of a host that is listed several times. In a list with such a host an entry
    without a number is one slot, as for mpirun. Each host comes with the place of its entry, for
    errors."""
    merged: dict[str, Host] = {}
    is_list_of_slots = False
    for host, where in hosts:
        name = host.name.lower()
        known = merged.setdefault(name, host)
        if known is host:
            continue
        if (known.user, known.port) != (host.user, host.port):
            raise HostListError(
                f"{where}: {host.name} was listed before, with another user or port; write the"
                " same each time"
            )
        is_list_of_slots = is_list_of_slots or known.slots is None or host.slots is None
        merged[name] = replace(
            known,
            slots=(known.slots or 1) + (host.slots or 1),
            max_slots=_sum(known.max_slots, host.max_slots),
        )
    if not is_list_of_slots:
        return tuple(merged.values())
    return tuple(replace(host, slots=host.slots or 1) for host in merged.values())


def few(names: Iterable[str], most: int = 3) -> str:
    """The first of the names, as thousands of hosts would fill the screen."""
    named = list(names)
    more = len(named) - most
    return ", ".join(named[:most]) + (f" and {more} more" if more > 0 else "")


def _sum(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else a + b


def place(
    hosts: Sequence[Host],
    num_proc: int | None,
    default_slots: Callable[[Host], int],
    remedy: str = "",
) -> tuple[Share, ...]:
    """Ranks host by host: each host is filled before the next. Without num_proc, all slots.

    More processes than slots are an error if every host has a given number of slots; a host whose
    number is only a guess gets more ranks than that, up to its max_slots. `remedy` ends the error.
    """
    slots = []
    for host in hosts:
        found = default_slots(host) if host.slots is None else host.slots
        slots.append(found if host.max_slots is None else min(found, host.max_slots))
    wanted = sum(slots) if num_proc is None else num_proc
    counts = []
    left = wanted
    for available in slots:
        counts.append(min(available, left))
        left -= counts[-1]
    while left:
        # The rest goes round the hosts whose slots are a guess.
        takers = [
            i
            for i, host in enumerate(hosts)
            if host.slots is None and (host.max_slots is None or counts[i] < host.max_slots)
        ]
        if not takers:
            raise _too_many(hosts, slots, wanted, wanted - left, remedy)
        for i in takers[:left]:
            counts[i] += 1
        left -= min(left, len(takers))
    return tuple(Share(host, count) for host, count in zip(hosts, counts, strict=True) if count)


def _too_many(
    hosts: Sequence[Host], slots: list[int], wanted: int, most: int, remedy: str
) -> TooManyProcesses:
    each = zip(hosts, slots, strict=True)
    given = few((f"{h.name}:{h.max_slots if h.slots is None else n}" for h, n in each), 8)
    slots_there = "1 slot" if most == 1 else f"{most} slots"
    more = remedy or f"give more slots, as in -H {hosts[0].name}:{wanted}"
    return TooManyProcesses(
        f"-np {wanted} asks for more processes than the {slots_there} of {given}; lower -np, or"
        f" {more}"
    )
