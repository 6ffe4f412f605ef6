"""Memory that all ranks of a host have mapped, and the tensors that lie in it.

Each call makes one region: a memfd without a name, whose first page holds a nonce (`world.
shared_memory`) and whose data follows. The storages of its tensors hold its mapping, so it lasts as
long as any of them; the kernel frees the pages when no process has them mapped. Nothing is in
/dev/shm, and other users reach none of it.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import mmap
import os
import secrets
import weakref
from dataclasses import dataclass

import torch

from hvdlite.errors import HorovodInternalError
from hvdlite.world import world
from hvdlite.world.shared_memory import NONCE_BYTES, lack_of_memory, open_shared

PAGE_BYTES = 4096
# Of every storage: a cache line, and what the widest vector instructions want.
ALIGNMENT_BYTES = 64

_libc = ctypes.CDLL(None, use_errno=True)

# Where something lies: the region's nonce, and the bytes from the region's begin. The ranks of a
# host have the same place for the same memory; no two regions of a job have the same nonce.
Place = tuple[bytes, int]


class Region:
    """The mapping of one region in this process; `tensor` and `storage` give parts of it."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        """descriptor: is the region's from now on."""
        try:
            self._map = mmap.mmap(descriptor, size_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        self.size_bytes = size_bytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        nonce = self._map[:NONCE_BYTES]
        _enter(_Known(self.address, self.address + size_bytes, nonce, descriptor))
        weakref.finalize(self._map, _forget, self.address).atexit = False

    def storage(self, offset_bytes: int, size_bytes: int) -> torch.UntypedStorage:
        """Some bytes of the region, which then lasts at least as long as they."""
        flat = torch.frombuffer(self._map, dtype=torch.uint8, offset=offset_bytes, count=size_bytes)
        return flat.untyped_storage()

    def make_read_only(self) -> None:
        """Ends all writing by this process: a later write is SIGSEGV."""
        # Not by a mapping that is read-only from the start: torch warns of its buffer.
        if _libc.mprotect(
            ctypes.c_void_p(self.address), ctypes.c_size_t(self.size_bytes), mmap.PROT_READ
        ):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), "mprotect")
        _regions[self.address].read_only = True


@dataclass
class _Known:
    """A region that this process has mapped, and the descriptor by which others get it."""

    begin: int
    end: int
    nonce: bytes
    descriptor: int
    read_only: bool = False


# By their first addresses, which are also in a list, ascending.
_regions: dict[int, _Known] = {}
_begins: list[int] = []


def _enter(known: _Known) -> None:
    _regions[known.begin] = known
    bisect.insort(_begins, known.begin)


def _forget(begin: int) -> None:
    """A region's mapping ends now: later its addresses may be something else's."""
    known = _regions.pop(begin)
    _begins.remove(begin)
    with contextlib.suppress(OSError):
        os.close(known.descriptor)


def region_at(address: int) -> _Known | None:
    """The region that has this address."""
    index = bisect.bisect_right(_begins, address) - 1
    if index >= 0:
        known = _regions[_begins[index]]
        if address < known.end:
            return known
    return None


def place_at(address: int) -> Place | None:
    """The place of an address; None if it is in no region that can be written."""
    known = region_at(address)
    return None if known is None or known.read_only else (known.nonce, address - known.begin)


def open_region(operation: str, size_bytes: int, advice: str) -> Region:
    """A region that the ranks of this host have in common, of zeros after its first page.

    Collective over the world; blocks. Other hosts may need another size.

    operation, advice: for texts.

    Raises:
        MemoryError: A host has too little memory. On every rank, as the next.
        HorovodInternalError: The ranks of a host can't share memory.
    """
    active = world.current()
    peers = active.team.peers
    total_bytes = PAGE_BYTES + -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
    if peers is None:
        return _private_region(operation, total_bytes, advice)
    placement = active.placement
    local = peers.split(placement.host) if len(placement.hosts) > 1 else peers
    region: Region | None = None
    lack: str | None = None
    problem: str | None = None
    try:
        if local.size == 1:
            region = _private_region(operation, total_bytes, advice)
        else:
            descriptor = open_shared(local, total_bytes, advice=advice)
            if descriptor is None:
                problem = (
                    f"the ranks on {placement.host_names[placement.host]} can't share memory: they "
                    "see neither each other's /proc/PID/fd nor the same /dev/shm, as in separate "
                    "containers; start them in one container, or with one PID namespace (--pid) "
                    "or IPC namespace (--ipc) for all of them"
                )
            else:
                region = Region(descriptor, total_bytes)
    except MemoryError as error:
        lack = str(error).removeprefix(f"{operation}: ") or "out of memory"
    except OSError as error:
        problem = f"rank {active.rank} could not map {total_bytes} bytes: {error}"
    finally:
        if local is not peers:
            local.free()
    answers = peers.allgather((lack, problem))
    lacks = sorted({text for text, _ in answers if text})
    problems = sorted({text for _, text in answers if text})
    if lacks:
        raise MemoryError(f"{operation}: {'; '.join(lacks)}")
    if problems:
        raise HorovodInternalError(f"{operation}: {'; '.join(problems)}")
    assert region is not None
    return region


def _private_region(operation: str, total_bytes: int, advice: str) -> Region:
    """Of a rank that is alone on its host; its forked children have it too."""
    problem = lack_of_memory(total_bytes, advice=advice)
    if problem:
        raise MemoryError(f"{operation}: {problem}")
    descriptor = os.memfd_create("hvdlite", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, total_bytes)
        os.pwrite(descriptor, secrets.token_bytes(NONCE_BYTES), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return Region(descriptor, total_bytes)
