"""What the link of one host carries to and from all others at once: plain TCP streams.

A process on that host sends back whatever it gets, as a server of parameters takes gradients and
gives parameters: a step of a worker moves the same bytes each way.
"""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.streams import PART_BYTES

LIMIT_S = 60.0


class Centre:
    """Sends back what comes, on threads of its own, for as long as the process lives."""

    def __init__(self, file: Path) -> None:
        """file: where the others learn the address."""
        self._server = socket.create_server(("", 0), family=socket.AF_INET)
        address = socket.gethostbyname(socket.gethostname())
        new = file.with_suffix(".new")
        new.write_text(f"{address} {self._server.getsockname()[1]}")
        new.rename(file)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            stream, _ = self._server.accept()
            threading.Thread(target=_send_back, args=(stream,), daemon=True).start()


def _send_back(stream: socket.socket) -> None:
    buffer = memoryview(bytearray(PART_BYTES))
    with stream:
        while got := stream.recv_into(buffer):
            stream.sendall(buffer[:got])


class Ray:
    """The stream of one of the others."""

    def __init__(self, file: Path) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not file.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no address in {file} after {LIMIT_S:g} s")
            time.sleep(0.01)
        address, port = file.read_text().split()
        self._stream = socket.create_connection((address, int(port)))
        self._sender = ThreadPoolExecutor(1)
        self._buffer = memoryview(bytearray(PART_BYTES))
        self._payload = bytes(PART_BYTES)
        self.received_bytes = 0

    def exchange(self, size_bytes: int) -> None:
        """Sends so many bytes and receives as many, at the same time."""
        sent = self._sender.submit(self._send, size_bytes)
        left = size_bytes
        while left:
            got = self._stream.recv_into(self._buffer, min(left, PART_BYTES))
            if not got:
                raise ConnectionError("the stream has ended")
            left -= got
            self.received_bytes += got
        sent.result()

    def _send(self, size_bytes: int) -> None:
        for begin in range(0, size_bytes, PART_BYTES):
            self._stream.sendall(self._payload[: min(PART_BYTES, size_bytes - begin)])

    def close(self) -> None:
        self._sender.shutdown()
        self._stream.close()
