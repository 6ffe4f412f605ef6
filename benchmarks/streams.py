"""What a link carries: plain TCP streams in both directions of every host's link at once.

    python benchmarks/streams.py NEXT SECONDS

runs on each host at the same time: it sends to the address NEXT and receives from whoever sends,
and prints the bytes per second that came, without the first quarter of the time.
"""

import socket
import sys
import threading
import time

PORT = 40777
BUFFER_BYTES = 1 << 18


def send(address: str, seconds: float) -> None:
    deadline = time.monotonic() + 10
    while True:  # the others start at other moments
        try:
            plug = socket.create_connection((address, PORT), timeout=seconds + 10)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    buffer = bytes(BUFFER_BYTES)
    with plug:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            plug.sendall(buffer)


def received_bytes_per_s(listener: socket.socket, seconds: float) -> float:
    plug = listener.accept()[0]
    buffer = bytearray(BUFFER_BYTES)
    start = time.monotonic()
    begin, end, count, first_count = start + seconds / 4, start, 0, 0
    while got := plug.recv_into(buffer):
        count += got
        end = time.monotonic()
        if end < begin:
            first_count = count
    return (count - first_count) / (end - begin)


def main() -> None:
    address, seconds = sys.argv[1], float(sys.argv[2])
    with socket.create_server(("", PORT)) as listener:
        sender = threading.Thread(target=send, args=(address, seconds))
        sender.start()
        print(received_bytes_per_s(listener, seconds))
        sender.join()


if __name__ == "__main__":
    main()
