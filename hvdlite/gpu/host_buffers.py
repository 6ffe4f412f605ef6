"""Pinned host memory of a queue, kept from one transfer to the next, as pinning it takes long."""

from __future__ import annotations

import collections
import threading

import torch

from hvdlite.gpu.devices import Devices, Mark

_SMALLEST_BYTES = 4096


class HostBuffers:
    """Buffers that transfers borrow. Safe to call from any thread."""

    def __init__(self, devices: Devices, most_bytes: int) -> None:
        """most_bytes: are kept while no transfer has them; what is more is freed."""
        self._devices = devices
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        # By size, the one used last at the end: buffers, and when their last copy is done; the
        # oldest first.
        self._kept: collections.OrderedDict[int, collections.deque[tuple[torch.Tensor, Mark]]] = (
            collections.OrderedDict()
        )
        self._kept_bytes = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """A buffer (uint8) of at least so many bytes, which no copy uses any more."""
        size = size_class(num_bytes)
        with self._lock:
            kept = self._kept.get(size)
            if kept and kept[0][1].query():
                self._kept_bytes -= size
                return kept.popleft()[0]
        # Buffers made in inference mode could not be written elsewhere.
        with torch.inference_mode(False):
            return self._devices.host_buffer(size)

    def give_back(self, buffer: torch.Tensor, done: Mark) -> None:
        """done: the last copy from or to it."""
        size = buffer.numel()
        with self._lock:
            self._kept.setdefault(size, collections.deque()).append((buffer, done))
            self._kept.move_to_end(size)
            self._kept_bytes += size
            while self._kept_bytes > self._most_bytes:
                self._free_one()

    def free(self) -> None:
        """Frees what is kept. Every copy must be done, or its end not matter any more."""
        with self._lock:
            self._kept.clear()
            self._kept_bytes = 0

    def _free_one(self) -> None:
        """Of the size that was used longest ago. (The allocator of pinned memory waits for copies
        that still use it.)"""
        size, kept = next(iter(self._kept.items()))
        if kept:
            kept.popleft()
            self._kept_bytes -= size
        if not kept:
            del self._kept[size]


def size_class(num_bytes: int) -> int:
    """The size of the buffer for so many bytes: at most an eighth more, and few different ones."""
    unit = max(_SMALLEST_BYTES, 1 << max(0, num_bytes.bit_length() - 4))
    return max(1, -(-num_bytes // unit)) * unit
