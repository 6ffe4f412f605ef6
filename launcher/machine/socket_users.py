"""Which user is at the other end of an AF_UNIX socket: an abstract one has no permissions."""

from __future__ import annotations

import os
import socket
import struct

CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
ALL_USERS = 2**32 - 1
DEFAULT_OVERFLOW = 65534


def user_of(sock: socket.socket) -> int:
    """The user at the other end: of a listening socket, the user that called listen."""
    return _peer(sock)[1]


def process_of(sock: socket.socket) -> int:
    """The process at the other end: of a listening socket, the one that called listen; 0 if it
    can't be seen here."""
    return _peer(sock)[0]


def is_trusted(sock: socket.socket) -> bool:
    """Whether the other end is this user or root."""
    process, user = _peer(sock)
    if user not in (os.geteuid(), 0):
        return False
    return not is_ambiguous(user) or _may_be_read(process)


def _peer(sock: socket.socket) -> tuple[int, int]:
    """Its process, 0 if it is in a PID namespace that can't be seen here, and its user."""
    given = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    process, user, _ = CREDENTIALS.unpack(given)
    return process, user


def is_ambiguous(user: int, proc: str = "/proc") -> bool:
    """Whether this number stands also for all users that this user namespace has no number for."""
    overflow = _text_of(f"{proc}/sys/kernel/overflowuid").strip()
    if user != (int(overflow) if overflow.isdecimal() else DEFAULT_OVERFLOW):
        return False
    mapped = _text_of(f"{proc}/self/uid_map").splitlines()
    return not mapped or sum(int(line.split()[2]) for line in mapped) < ALL_USERS


def _text_of(path: str) -> str:
    """'' where it can't be read."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _may_be_read(process: int) -> bool:
    """The kernel compares the users themselves, not their numbers here."""
    try:
        os.readlink(f"/proc/{process}/ns/user")
    except OSError:
        return False
    return process > 0
