"""The network interfaces of a host and their addresses, from the kernel."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

# <linux/netlink.h>, <linux/rtnetlink.h>, <linux/if_addr.h>
_REQUEST_DUMP = 0x1 | 0x300
_DONE, _ERROR, _NEW_ADDRESS, _GET_ADDRESS = 3, 2, 20, 22
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_SCOPE_LINK = 253  # and above it: the host's own
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_ADDRESS = struct.Struct("=BBBBI")  # family, prefix, flags, scope, interface
_ATTRIBUTE = struct.Struct("=HH")
_IFF_UP = 0x1
_NO_HARDWARE = 0xFFFE  # ARPHRD_NONE: tun, WireGuard


def interfaces() -> list[dict[str, object]]:
    """One entry per address that other hosts could reach; fields as in `host_facts.Interface`."""
    found = []
    for index, address, prefix in _addresses():
        try:
            name = socket.if_indextoname(index)
        except OSError:  # gone meanwhile, as a container's may be
            continue
        state = _read(name, "operstate") or "unknown"
        found.append(
            {
                "name": name,
                "address": address,
                "prefix": prefix,
                "up": bool(int(_read(name, "flags") or "1", 16) & _IFF_UP),
                "running": state in ("up", "unknown"),
                "tunnel": int(_read(name, "type") or 0) == _NO_HARDWARE,
            }
        )
    return found


def _read(name: str, field: str) -> str:
    try:
        with open(f"/sys/class/net/{name}/{field}") as file:
            return file.read().strip()
    except OSError:
        return ""


def _addresses() -> Iterator[tuple[int, str, int]]:
    try:
        sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
    except OSError:  # a sandbox may forbid such sockets
        return
    try:
        request = _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        length = _HEADER.size + len(request)
        sock.send(_HEADER.pack(length, _GET_ADDRESS, _REQUEST_DUMP, 1, 0) + request)
        while True:
            data = sock.recv(1 << 16)
            while data:
                length, kind, *_ = _HEADER.unpack_from(data)
                message, data = data[_HEADER.size : length], data[(length + 3) & ~3 :]
                if kind in (_DONE, _ERROR):
                    return
                if kind == _NEW_ADDRESS:
                    yield from _parse(message)
    finally:
        sock.close()


def _parse(message: bytes) -> Iterator[tuple[int, str, int]]:
    family, prefix, _, scope, index = _ADDRESS.unpack_from(message)
    if family not in (socket.AF_INET, socket.AF_INET6) or scope >= _SCOPE_LINK:
        return
    values = {}
    rest = message[_ADDRESS.size :]
    while len(rest) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(rest)
        values[kind] = rest[_ATTRIBUTE.size : length]
        rest = rest[max(_ATTRIBUTE.size, (length + 3) & ~3) :]
    # On a point-to-point link _IFA_ADDRESS is the other end's address.
    raw = values.get(_IFA_LOCAL) or values.get(_IFA_ADDRESS)
    if raw:
        yield index, socket.inet_ntop(family, raw), prefix
