"""Checks from here whether addresses answer: all at once, by connections that send nothing."""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Iterable

CONNECT_S = 1.0  # an answer comes much sooner, or never


def connect_all(addresses: Iterable[str], port: int) -> dict[str, bool]:
    """By address: whether a host has answered, if only with a refusal."""
    poll = select.poll()
    pending: dict[int, tuple[str, socket.socket]] = {}
    reached: dict[str, bool] = {}
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        reached[address] = False
        try:
            sock.connect((address, port))
        except BlockingIOError:
            poll.register(sock, select.POLLOUT)
            pending[sock.fileno()] = (address, sock)
            continue
        except OSError as error:
            reached[address] = isinstance(error, ConnectionRefusedError)
        sock.close()
    deadline = time.monotonic() + CONNECT_S
    while pending and (left := deadline - time.monotonic()) > 0:
        for fd, _ in poll.poll(left * 1000):
            address, sock = pending.pop(fd)
            error_number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            reached[address] = error_number in (0, errno.ECONNREFUSED)
            poll.unregister(fd)
            sock.close()
    for _, sock in pending.values():
        sock.close()
    return reached
