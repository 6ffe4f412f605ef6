"""The memory that the ranks of a host share: the lowest rank makes it, the others open it.

It is a memfd: so no name is left after a crash, and the limit of a container's /dev/shm does not
apply. Without MPI its descriptor is passed over the ranks' sockets. Under MPI the others open it
through /proc/<pid>/fd. If that fails (another PID namespace, hidepid), it is a file in /dev/shm,
unlinked as soon as all ranks have it open. If that fails too, these ranks can't share memory, and
the caller works without it.

Before it reserves pages, the lowest rank compares the size with the available memory, because a
reservation beyond a cgroup's limit ends in SIGKILL and not in an error. So too little memory is an
exception at init, never a SIGBUS in the middle of training.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

from hvdlite import _core
from hvdrun.for_hvdlite import available_bytes, left_in_cgroup_bytes

if TYPE_CHECKING:
    from hvdlite.world.bootstrap.peers import Peers

NONCE_BYTES = 16
assert NONCE_BYTES <= _core.CALLER_BYTES

Offer = tuple[str, bytes]  # path, nonce

SMALLER_ENGINE = "set HVDLITE_BLOCK_BYTES (or HVDLITE_EVENT_LOG) to a smaller value"


def open_shared(
    local: Peers, size_bytes: int, more_bytes: int = 0, advice: str = SMALLER_ENGINE
) -> int | None:
    """A file descriptor of memory that all ranks of `local` have open; None if they can't share.

    Collective over `local`. All pages are reserved, each rank reserving its own part, and are zero
    but for the nonce at their start. The caller closes the descriptor.

    more_bytes: what these ranks allocate besides. advice: what to do where that is too much.

    Raises:
        MemoryError: Less memory than that is available; on every rank.
    """
    problem = lack_of_memory(size_bytes + more_bytes, advice=advice) if local.rank == 0 else None
    problem = local.bcast(problem, root=0)
    if problem:
        raise MemoryError(problem)
    for make in (_memfd,) if local.passes_descriptors else (_memfd, _named_file):
        descriptor = _try(local, size_bytes, make)
        if descriptor is not None:
            return descriptor
    return None


def offer_memory(size_bytes: int) -> tuple[int, Offer]:
    """New memory that other processes of this host may open: its descriptor, and what they need.
    They can as long as this process keeps the descriptor open.

    Raises:
        OSError: There are no memfds.
    """
    descriptor, offer, _ = _memfd(size_bytes)
    return descriptor, offer


def open_offer(offer: Offer) -> int:
    """The descriptor of offered memory, which the caller closes; -1: this process can't open it."""
    return _open(*offer)


def mechanism() -> str | None:
    """How the ranks of this host would share memory, in words; None if they can't."""
    for make, name in ((_memfd, "memfd, without a name or a limit"), (_named_file, "/dev/shm")):
        with contextlib.suppress(OSError):
            descriptor, _, unlink = make(_core.CALLER_BYTES)
            os.close(descriptor)
            if unlink is not None:
                os.unlink(unlink)
            return name
    return None


def _try(
    local: Peers, size_bytes: int, make: Callable[[int], tuple[int, Offer, str | None]]
) -> int | None:
    descriptor = -1
    offer: Offer | None = None
    unlink: str | None = None
    if local.rank == 0:
        with contextlib.suppress(OSError):
            descriptor, offer, unlink = make(size_bytes)
    if local.passes_descriptors:
        passed = local.pass_descriptor(descriptor)
        descriptor = descriptor if local.rank == 0 else passed
    else:
        offer = local.bcast(offer, root=0)
        if offer is not None and local.rank != 0:
            descriptor = _open(*offer)
    try:
        if descriptor >= 0:
            _reserve_part(descriptor, size_bytes, local.rank, local.size)
        failed = descriptor < 0
    except OSError:
        failed = True
    all_opened = not any(local.allgather(failed))
    if unlink is not None:
        os.unlink(unlink)
    if all_opened:
        return descriptor
    if descriptor >= 0:
        os.close(descriptor)
    return None


def _memfd(size_bytes: int) -> tuple[int, Offer, str | None]:
    descriptor = os.memfd_create("hvdlite", os.MFD_CLOEXEC)
    nonce = _prepare(descriptor, size_bytes)
    return descriptor, (f"/proc/{os.getpid()}/fd/{descriptor}", nonce), None


def _named_file(size_bytes: int) -> tuple[int, Offer, str | None]:
    path = f"/dev/shm/hvdlite-{secrets.token_hex(8)}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        nonce = _prepare(descriptor, size_bytes)
    except BaseException:
        os.unlink(path)
        raise
    return descriptor, (path, nonce), path


def _prepare(descriptor: int, size_bytes: int) -> bytes:
    """Sizes the memory and marks it with a nonce, by which the others recognize it."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    try:
        os.ftruncate(descriptor, size_bytes)
        os.pwrite(descriptor, nonce, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return nonce


def _open(path: str, nonce: bytes) -> int:
    """The descriptor, or -1 if that path does not exist or belongs to another process.

    In another PID namespace the same number is another process.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return -1
    try:
        if os.pread(descriptor, NONCE_BYTES, 0) == nonce:
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return -1


def _reserve_part(descriptor: int, size_bytes: int, rank: int, size: int) -> None:
    """Each rank reserves the part that it will mostly write: the first touch puts a page on the
    NUMA node of the rank."""
    begin = size_bytes * rank // size
    end = size_bytes * (rank + 1) // size
    if end > begin:
        os.posix_fallocate(descriptor, begin, end - begin)


def lack_of_memory(size_bytes: int, root: str = "/", advice: str = SMALLER_ENGINE) -> str | None:
    """The text of an error if less than this is available; None if there is enough."""
    for available, what in (
        (available_bytes(root), "available on this host"),
        (left_in_cgroup_bytes(root), "left below the memory limit of this job's cgroup"),
    ):
        if available is not None and available < size_bytes:
            return (
                f"the ranks of {os.uname().nodename} need {size_bytes >> 20} MiB of memory, but "
                f"{available >> 20} MiB are {what}; {advice}, or start fewer ranks"
            )
    return None
