"""Shared memory in other processes that a rank starts, as a DataLoader's spawned workers.

torch sends a storage to another process by moving it to a file in /dev/shm. Of one in shared memory
that would make a private copy, on this rank too: its descriptor is sent instead. (A forked child
has the memory anyway; and a plain pickle, as in torch.save, has the values.)
"""

from __future__ import annotations

import os
from multiprocessing import popen_spawn_posix
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

from hvdlite.shared.memory import Region, mapping_at, mapping_of


def allow() -> None:
    """From now on processes of Python's and torch's multiprocessing get the memory itself."""
    ForkingPickler.register(torch.UntypedStorage, _reduce)


def _reduce(storage: torch.UntypedStorage) -> Any:
    address = storage.data_ptr() if storage.device.type == "cpu" else 0
    mapping = mapping_at(address)
    if mapping is None:
        return reductions.reduce_storage(storage)  # type: ignore[no-untyped-call]
    region = (_sendable(mapping.descriptor), mapping.end - mapping.begin, mapping.nonce)
    return _rebuild, (*region, mapping.read_only, address - mapping.begin, storage.nbytes())


def _sendable(descriptor: int) -> Any:
    """What is pickled of a descriptor: its `detach` gives one to the process that unpickles it."""
    popen = get_spawning_popen()
    if not isinstance(popen, popen_spawn_posix.Popen):
        return DupFd(descriptor)
    # A spawned process inherits it, and must not be told of it twice.
    if descriptor not in popen._fds:  # type: ignore[attr-defined]
        popen.duplicate_for_child(descriptor)
    return _Inherited(descriptor)


class _Inherited:
    """A descriptor that this process has from its parent. Several tensors may come by it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def detach(self) -> int:
        return os.dup(self._descriptor)


def _rebuild(
    sent: Any, region_bytes: int, nonce: bytes, read_only: bool, offset_bytes: int, size_bytes: int
) -> torch.UntypedStorage:
    descriptor = sent.detach()
    mapping = mapping_of(nonce)
    storage = None if mapping is None else mapping.storage(offset_bytes, size_bytes)
    if storage is not None:
        os.close(descriptor)
        return storage
    region = Region(descriptor, region_bytes)
    if read_only:
        region.make_read_only()
    allow()  # this process may send it on
    return region.storage(offset_bytes, size_bytes)
