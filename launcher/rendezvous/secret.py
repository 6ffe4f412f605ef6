"""The secret that all hosts of a job share, and the key that follows from it."""

from __future__ import annotations

import hmac
import os
import stat
from collections.abc import MutableMapping
from ipaddress import ip_address

from hvdrun.errors import UsageError
from hvdrun.machine.environment import RENDEZVOUS_SECRET
from hvdrun.machine.own_files import open_file

VARIABLE = RENDEZVOUS_SECRET
FILE_OPTION = "--rendezvous-secret-file"
FEWEST_CHARACTERS = 32
_LARGEST_FILE_BYTES = 65536
HOW_TO_MAKE = (
    "make one with `openssl rand -hex 32`, give it to every host in a file that only you can read"
    f" ({FILE_OPTION} FILE) or as {VARIABLE}, and start again"
)


def take(environ: MutableMapping[str, str], path: str | None) -> str:
    """The secret from the file, else from the variable, which is removed so that no process that
    hvdrun starts inherits it; "" if there is none.

    Raises UsageError for a secret that is too short, and a file that can't be read, that others can
    read, or to which another user's symlink leads.
    """
    given = environ.pop(VARIABLE, "").strip()
    source = VARIABLE
    if path is not None:
        given, source = _of_file(path), f"{FILE_OPTION} {path}"
    if not given and path is None:
        return ""
    if len(given) < FEWEST_CHARACTERS:
        raise UsageError(
            f"{source}: the secret has {len(given)} characters, and one of less than"
            f" {FEWEST_CHARACTERS} can be guessed; {HOW_TO_MAKE}"
        )
    return given


def _of_file(path: str) -> str:
    try:
        fd = open_file(path, os.O_RDONLY | os.O_NONBLOCK)
        with open(fd, encoding="utf-8", errors="surrogateescape") as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise UsageError(f"{FILE_OPTION} {path}: this is not a file")
            if found.st_uid not in (os.geteuid(), 0):
                raise UsageError(
                    f"{FILE_OPTION} {path}: the file belongs to user {found.st_uid}, who knows the"
                    " secret and could run programs as you; copy it into a file of your own"
                )
            # Kubernetes gives a pod root's file with the pod's group.
            if found.st_mode & (0o007 if found.st_uid == 0 else 0o077):
                who = "other users" if found.st_mode & 0o007 else "others of its group"
                raise UsageError(
                    f"{FILE_OPTION} {path}: {who} can read or change it (mode"
                    f" {stat.S_IMODE(found.st_mode):04o}); `chmod 600 {path}`, or for a Kubernetes"
                    " secret `defaultMode: 0400`"
                )
            return file.read(_LARGEST_FILE_BYTES).strip()
    except OSError as error:
        raise UsageError(f"{FILE_OPTION} {path}: {error.strerror}") from error


def key_of(secret: str) -> bytes:
    """32 bytes. Within one machine, where none is needed, that of ""."""
    return hmac.digest(b"hvdlite rendezvous", secret.encode(errors="surrogateescape"), "sha256")


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def name_here(port: int) -> str:
    """By which nodes of one machine meet that have no secret (see agent.peers): anybody can find
    and take the name, and so only the kernel's word about the other end counts."""
    return f"rendezvous {port}"


def hint(host: str, only_this_user: bool) -> str:
    """What to say besides to nodes that have not met at `host`."""
    if not is_loopback(host):
        return ""
    text = f"; {host} is each host itself: other hosts need node 0's name in its place"
    if only_this_user:
        text += (
            "; this node has no secret: the others here must have none either, and be the same"
            " user's, in the same network namespace and with the same host name"
        )
    return text


def check_needed(host: str, secret: str) -> None:
    """Raises UsageError if hosts that meet at `host` need a secret and there is none."""
    if not secret and not is_loopback(host):
        raise UsageError(
            f"hosts that connect to {host} must share a secret, else anybody who reaches its port"
            f" could run programs as you, and none was given; {HOW_TO_MAKE}"
        )
