"""How the processes of a job find their supervisor on a host, and whom they trust there.

Each job has a random key, which its processes have in HVDRUN_LINK. The supervisor (hvdrun, or the
host agent) listens on a socket whose name is a hash of the key, the host and the user. So no other
user of the host can know the name and take it first. Nothing else depends on the key, which MPI
sends in plain text, and once the socket exists, everybody on the host can read its name: therefore
both ends ask the kernel which user is at the other.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time

from hvdrun.machine.socket_users import is_trusted, user_of

BOOT_ID = "/proc/sys/kernel/random/boot_id"
TIME = struct.Struct("ll")  # seconds, microseconds
# How long the listener's queue may stay full: all ranks of a host connect at once.
QUEUE_S = 20
SILENT = "a process that does not answer"
# The longest time of another process of the job between bind and listen.
SETTLE_S = 1.0


class Stranger(Exception):
    """Another user's process is where a process of this job should be."""

    def __init__(self, who: str) -> None:
        host = os.uname().nodename
        super().__init__(
            f"on {host}, {who} holds the socket of this job's supervisor; hvdrun sent nothing to"
            f" it: ask the administrator of {host} to find it (`ss -xlp`), and start the job again"
        )


def address(secret: str) -> bytes:
    """The address of the supervisor's socket on this host. It has no file, so nothing stays behind.

    Two hosts may have the same name, and containers share the boot number: both go into the hash.
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
        from _blake2 import blake2b  # hashlib, which wraps it, takes longer to load

        return blake2b(data, key=key, digest_size=16).digest()
    except (ImportError, ValueError):  # missing, or forbidden, as on RHEL in FIPS mode
        import hmac

        return hmac.digest(key, data, "sha256")[:16]


def connect(secret: str) -> socket.socket | None:
    """A connection to the supervisor of this host; None if there is none.

    Raises:
        Stranger: another user's process has its socket.
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
    """The supervisor's socket, as a file descriptor. None if another process of the job has it, as
    two host names mean this machine: the ranks find that process.

    Raises:
        Stranger: another user's process has it.
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
