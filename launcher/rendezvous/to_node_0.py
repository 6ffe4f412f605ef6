"""How another node connects to node 0."""

from __future__ import annotations

import errno
import os
import socket

from hvdrun.agent import peers
from hvdrun.rendezvous.place import Place
from hvdrun.rendezvous.secret import name_here

CONNECT_S = 5.0


class ToNode0:
    """`only_this_user`: without a secret; node 0 must be this user's or root's, on this machine."""

    def __init__(self, place: Place, only_this_user: bool) -> None:
        self.place = place
        self.only_this_user = only_this_user
        # Of node 0: the family, and the whole address, as a link-local one of IPv6 needs its scope.
        self.found: tuple[int, tuple[object, ...]] | None = None

    def settle(self, sock: socket.socket) -> None:
        """Node 0 is at the other end. Later connections are to the same address, without asking for
        that of its name again. Raises OSError if the connection has ended."""
        self.found = sock.family, sock.getpeername()

    def connect(self) -> socket.socket | str:
        """A connection to node 0, or why there is none."""
        try:
            if self.only_this_user:
                here = peers.connect(name_here(self.place.port))
                return os.strerror(errno.ECONNREFUSED) if here is None else here
            sock = self._connect()
        except peers.Stranger as stranger:
            return str(stranger)
        except socket.gaierror:
            return f"the name {self.place.host} is unknown here"
        except UnicodeError:
            return (
                f"{self.place.host} is no name: a part of it is empty, or longer than 63 characters"
            )
        except TimeoutError:
            return "it does not answer"
        except OSError as error:
            return error.strerror or str(error)
        if _is_itself(sock):
            sock.close()
            return "nothing listens there"
        return sock

    def _connect(self) -> socket.socket:
        if self.found is None:
            return socket.create_connection((self.place.host, self.place.port), CONNECT_S)
        family, address = self.found
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(CONNECT_S)
            sock.connect(address)
        except OSError:
            sock.close()
            raise
        return sock


def _is_itself(sock: socket.socket) -> bool:
    """TCP can connect a free port to itself."""
    try:
        return bool(sock.getsockname() == sock.getpeername())
    except OSError:  # it has been closed already, which its reader finds out
        return False
