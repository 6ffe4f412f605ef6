"""How another node connects to node 0, and what it finds out about the other end first."""

from __future__ import annotations

import socket

from hvdrun.machine.tcp_users import listener_is_trusted, other_end_is_trusted
from hvdrun.rendezvous.place import Place

CONNECT_S = 5.0
_ANOTHER_USER = "a process of another user listens there"


class ToNode0:
    """`only_this_user`: for loopback without a secret; node 0 must be this user's or root's."""

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
            sock = self._connect()
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
        try:
            why = self._why_not(sock)
        except OSError as error:  # it has been closed already
            why = error.strerror or str(error)
        if why:
            sock.close()
            return why
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

    def _why_not(self, sock: socket.socket) -> str:
        """Why a new connection can't be one to node 0; "" if it can. Raises OSError."""
        if sock.getsockname() == sock.getpeername():  # TCP can connect a free port to itself
            return "nothing listens there"
        if self.only_this_user and not listener_is_trusted(sock):
            return _ANOTHER_USER
        return ""

    def check_again(self, sock: socket.socket) -> str:
        """Why node 0 is not what it seems; "" if it is. Who listened may not be who accepted: the
        listener may have changed in between. To be asked once there is an answer."""
        if not self.only_this_user:
            return ""
        try:
            return "" if other_end_is_trusted(sock) else _ANOTHER_USER
        except OSError as error:  # it has been closed already
            return error.strerror or str(error)
