"""Where the processes of a job find their supervisor on a host, and whom they trust there.

Each job has a secret, which its processes have in HVDRUN_LINK. From it, the host and the user comes
the name of the socket that the supervisor (hvdrun, or the host agent) listens on. So the name is
told to nobody, and nobody can have it first. Everybody on the host can read it once it is there:
both ends ask the kernel who is at the other.
"""

from __future__ import annotations

import errno
import os
import struct
import time

# typing costs 10 ms of each start, and collections.abc as much.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
else:  # see link
    import _socket as socket

CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
BOOT_ID = "/proc/sys/kernel/random/boot_id"
TIME = struct.Struct("ll")  # seconds, microseconds
# How long who listens may leave its queue full: all ranks of a host come at once.
QUEUE_S = 20
SILENT = "a process that does not answer"
# How long another process of the job may take between its name and its readiness.
SETTLE_S = 1.0


class Stranger(Exception):
    """Another user's process is where a process of this job should be."""

    def __init__(self, who: str) -> None:
        host = os.uname().nodename
        super().__init__(
            f"on {host} {who} has taken the socket of this job's supervisor; nothing was sent to"
            f" it: have the administrator of {host} look for it (`ss -xlp`), and start the job"
            " again"
        )


def address(secret: str) -> bytes:
    """Of the supervisor's socket on this host. It has no file, so that nothing can stay behind.

    Names of hosts are not always different, and containers have that of the boot in common.
    """
    boot = b""
    try:
        with open(BOOT_ID, "rb") as file:
            boot = file.read()
    except OSError:
        pass
    place = b"%s\0%s\0%d" % (os.fsencode(os.uname().nodename), boot, os.geteuid())
    return b"\0hvdrun-" + _keyed_hash(secret.encode(), place).hex().encode()


def _keyed_hash(key: bytes, data: bytes) -> bytes:
    try:
        from _blake2 import blake2b  # what hashlib wraps: that takes longer to load

        return blake2b(data, key=key, digest_size=16).digest()
    except (ImportError, ValueError):  # not there, or forbidden, as by RHEL in FIPS mode
        import hmac

        return hmac.digest(key, data, "sha256")[:16]


def user_of(sock: socket.socket) -> int:
    """The user at the other end: of a listener the one that made it listen."""
    given = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return int(CREDENTIALS.unpack(given)[1])


def is_trusted(sock: socket.socket) -> bool:
    """An abstract name has no permissions: who is there is this user, or root."""
    return user_of(sock) in (os.geteuid(), 0)


def connect(secret: str) -> socket.socket | None:
    """A connection to the supervisor of this host; None where there is none.

    Raises:
        Stranger: somebody else is in its place.
    """
    sock = socket.socket(socket.AF_UNIX)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, TIME.pack(QUEUE_S, 0))
    try:
        sock.connect(address(secret))
    except BlockingIOError:
        sock.close()
        raise Stranger(SILENT) from None
    except OSError:
        sock.close()
        return None
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, TIME.pack(0, 0))  # no limit
    if not is_trusted(sock):
        user = user_of(sock)
        sock.close()
        raise Stranger(f"a process of user {user}")
    return sock


def listen(secret: str) -> int | None:
    """The supervisor's socket, as a file descriptor; None where another process of the job has it,
    as two names of hosts mean this one: the ranks find that process.

    Raises:
        Stranger: somebody else has it.
    """
    give_up_at = time.monotonic() + SETTLE_S
    while True:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.bind(address(secret))
            sock.listen(1024)
            return sock.detach()
        except OSError as error:
            sock.close()
            if error.errno != errno.EADDRINUSE:
                raise
        other = connect(secret)
        if other is not None:
            other.close()
            return None
        if time.monotonic() > give_up_at:
            raise Stranger(SILENT)
        time.sleep(0.02)
