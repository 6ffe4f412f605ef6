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
from hvdlite.world.teams.shared_memory import NONCE_BYTES, lack_of_memory, open_shared

PAGE_BYTES = 4096
# Of every storage: a cache line, and what the widest vector instructions want.
ALIGNMENT_BYTES = 64

_libc = ctypes.CDLL(None, use_errno=True)

# Where something lies: the region's nonce, and the bytes from the region's begin. The ranks of a
# host have the same place for the same memory; no two regions of a job have the same nonce.
Place = tuple[bytes, int]


class Region:
    """A region that this process has mapped, and keeps mapped as long as this object lives or a
    storage in it does."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        """descriptor: is the region's from now on."""
        try:
            self._map = mmap.mmap(descriptor, size_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        begin = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        nonce = self._map[:NONCE_BYTES]
        self._mapping = Mapping(
            begin, begin + size_bytes, nonce, descriptor, weakref.ref(self._map)
        )
        _enter(self._mapping)
        weakref.finalize(self._map, _forget, begin).atexit = False

    @property
    def descriptor(self) -> int:
        """Of the memory; it is the region's."""
        return self._mapping.descriptor

    def storage(self, offset_bytes: int, size_bytes: int) -> torch.UntypedStorage:
        """Some bytes of the region, at least one."""
        return _storage(self._map, offset_bytes, size_bytes)

    def make_read_only(self) -> None:
        """Ends all writing by this process: a later write is SIGSEGV."""
        # Not by a mapping that is read-only from the start: torch warns of its buffer.
        begin, size_bytes = self._mapping.begin, self._mapping.end - self._mapping.begin
        if _libc.mprotect(ctypes.c_void_p(begin), ctypes.c_size_t(size_bytes), mmap.PROT_READ):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), "mprotect")
        self._mapping.read_only = True


@dataclass
class Mapping:
    """Where this process has a region. descriptor: by which others get it."""

    begin: int
    end: int
    nonce: bytes
    descriptor: int
    map: weakref.ref[mmap.mmap]
    read_only: bool = False

    def storage(self, offset_bytes: int, size_bytes: int) -> torch.UntypedStorage | None:
        """As of `Region`; None if it is just being unmapped."""
        memory = self.map()
        return None if memory is None else _storage(memory, offset_bytes, size_bytes)


def _storage(memory: mmap.mmap, offset_bytes: int, size_bytes: int) -> torch.UntypedStorage:
    # The storage holds the mapping.
    flat = torch.frombuffer(memory, dtype=torch.uint8, offset=offset_bytes, count=size_bytes)
    return flat.untyped_storage()


# By their first addresses, which are also in a list, ascending.
_mappings: dict[int, Mapping] = {}
_begins: list[int] = []


def _enter(mapping: Mapping) -> None:
    _mappings[mapping.begin] = mapping
    bisect.insort(_begins, mapping.begin)


def _forget(begin: int) -> None:
    """A region is unmapped now: later its addresses may be something else's."""
    mapping = _mappings.pop(begin)
    _begins.remove(begin)
    with contextlib.suppress(OSError):
        os.close(mapping.descriptor)


def mapping_at(address: int) -> Mapping | None:
    """The mapping that has this address."""
    index = bisect.bisect_right(_begins, address) - 1
    if index >= 0:
        mapping = _mappings[_begins[index]]
        if address < mapping.end:
            return mapping
    return None


def mapping_of(nonce: bytes) -> Mapping | None:
    """The mapping of the region with this nonce."""
    return next((mapping for mapping in _mappings.values() if mapping.nonce == nonce), None)


def place_at(address: int) -> Place | None:
    """The place of an address; None if it is in no region that can be written."""
    mapping = mapping_at(address)
    if mapping is None or mapping.read_only:
        return None
    return mapping.nonce, address - mapping.begin


def place_of(tensor: torch.Tensor) -> Place | None:
    """Where a tensor in a region begins, alike on every rank of its host; None if it is in none."""
    try:
        address = tensor.data_ptr() if tensor.device.type == "cpu" else 0
    except (RuntimeError, AttributeError):  # one without memory, or no tensor at all
        return None
    return place_at(address)


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
