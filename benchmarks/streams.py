"""Measures what the links between hosts carry: plain TCP streams, in both directions at once.

The first rank of each host sends to that of the next host and receives from that of the one
before: with two hosts each link is full in both directions, and so it is with more. The bytes are
those that an allreduce of the buffer must at least send and receive per host, 2(H-1)/H · N, so that
the time of a round is the bound itself, and bytes/time the goodput.
"""

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from torch import Tensor

from benchmarks.figures import wire_bytes

PART_BYTES = 1 << 20  # of one call of the socket


class Streams:
    """The connections of one rank. Only the first rank of a host has any."""

    def __init__(self, comm: Any, host: int, hosts: int, local_rank: int) -> None:
        """Collective over comm. host: this rank's host, of `hosts`."""
        self._hosts = hosts
        self._first = local_rank == 0
        with socket.create_server(("", 0), family=socket.AF_INET) as server:
            address = (socket.gethostbyname(socket.gethostname()), server.getsockname()[1])
            everyones = comm.allgather((host, self._first, address))
            addresses = {of: address for of, first, address in everyones if first}
            if self._first:
                self._to = socket.create_connection(addresses[(host + 1) % hosts])
                self._from, _ = server.accept()
        self._sender = ThreadPoolExecutor(1)
        self._buffer = bytearray(PART_BYTES)
        self.received_bytes = 0

    def bind(self, buffer: Tensor) -> Callable[[], None]:
        """Returns a function that sends and receives as much as an allreduce of this buffer
        must."""
        return partial(self._exchange, wire_bytes(buffer.nbytes, self._hosts), b"x" * PART_BYTES)

    def close(self) -> None:
        self._sender.shutdown()
        if self._first:
            self._to.close()
            self._from.close()

    def _exchange(self, size_bytes: int, payload: bytes) -> None:
        if not self._first:
            return
        sent = self._sender.submit(self._send, size_bytes, payload)
        left = size_bytes
        while left:
            got = self._from.recv_into(self._buffer, min(left, PART_BYTES))
            if not got:
                raise ConnectionError("the stream from the host before has ended")
            left -= got
            self.received_bytes += got
        sent.result()

    def _send(self, size_bytes: int, payload: bytes) -> None:
        for begin in range(0, size_bytes, PART_BYTES):
            self._to.sendall(memoryview(payload)[: min(PART_BYTES, size_bytes - begin)])
