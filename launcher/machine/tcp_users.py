"""Which user is at the other end of a TCP connection within this host: the kernel's table says
it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from ipaddress import IPv6Address, ip_address
from typing import NamedTuple

from hvdrun.machine.socket_users import is_ambiguous

_LISTENS = "0A"
# A listener for both families stands in the table of IPv6, and so do the ends of its connections.
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


class _Row(NamedTuple):
    local: tuple[str, int]
    remote: tuple[str, int]
    state: str
    user: int
    inode: int


def why_unknown(table: str = _TABLES[0]) -> str:
    """Why users can't be told apart here; "" if they can."""
    if is_ambiguous(os.geteuid()):
        return "this user has no number of its own in its user namespace"
    try:
        with open(table):
            return ""
    except OSError as error:
        return f"{table} can't be read ({error.strerror})"


def other_end_is_trusted(sock: socket.socket) -> bool:
    """Whether this user or root holds the other end of a connection over loopback. False, too,
    before its listener has accepted it."""
    near, far = _ends(sock)
    return any(row.local == far and row.remote == near and _is_ours(row) for row in _rows(far[1]))


def listener_is_trusted(sock: socket.socket) -> bool:
    """Whether this user or root listens where a connection over loopback was made to."""
    _, far = _ends(sock)
    listeners = [
        row
        for row in _rows(far[1])
        if row.state == _LISTENS
        and row.local[1] == far[1]
        and row.local[0] in (far[0], "0.0.0.0", "::")
    ]
    return bool(listeners) and all(_is_ours(row) for row in listeners)


def _is_ours(row: _Row) -> bool:
    # A socket that its process has closed has no inode, and then root's number as its user.
    return row.inode > 0 and row.user in (os.geteuid(), 0) and not is_ambiguous(row.user)


def _ends(sock: socket.socket) -> tuple[tuple[str, int], tuple[str, int]]:
    near, far = sock.getsockname(), sock.getpeername()
    return (_plain(near[0]), near[1]), (_plain(far[0]), far[1])


def _plain(address: str) -> str:
    found = ip_address(address.partition("%")[0])
    if isinstance(found, IPv6Address) and found.ipv4_mapped:
        found = found.ipv4_mapped
    return str(found)


def _rows(port: int) -> Iterator[_Row]:
    """Those with this local port; a host may have very many others."""
    for path in _TABLES:
        try:
            with open(path) as table:
                lines = table.readlines()[1:]
        except OSError:
            continue
        mark = f":{port:04X} "
        for line in lines:
            if mark not in line:
                continue
            words = line.split()
            if not words[1].endswith(mark[:-1]):
                continue
            yield _Row(_end(words[1]), _end(words[2]), words[3], int(words[7]), int(words[9]))


def _end(text: str) -> tuple[str, int]:
    """An address as the kernel prints it: words of four bytes in the machine's own order."""
    address, _, port = text.partition(":")
    words = [bytes.fromhex(address[at : at + 8]) for at in range(0, len(address), 8)]
    raw = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    return _plain(str(ip_address(raw))), int(port, 16)
