"""The role `reach`: in ssh's place where hosts start hvdrun themselves. Runs a program on another
one of them, with this process's standard descriptors, and ends with its exit code."""

from __future__ import annotations

import os
from typing import NoReturn

from hvdrun.agent.frames import BYE, HOST, frame, receive, send, unpack, write_all
from hvdrun.agent.peers import Stranger, connect
from hvdrun.machine.environment import NODES

FAILED = 255  # as ssh


def main(arguments: list[str]) -> NoReturn:
    host = arguments[0]
    try:
        sock = connect(os.environ.get(NODES, ""))
    except Stranger as stranger:
        _fail(str(stranger))
    if sock is None:
        _fail(f"no connection to {host} was made: hvdrun has ended")
    send(
        sock, frame(HOST, payload="\0".join(arguments).encode(errors="surrogateescape")), [0, 1, 2]
    )
    buffer = bytearray()
    while True:
        try:
            data, _ = receive(sock)
        except OSError:
            data = b""
        if not data:
            _fail(f"hvdrun has ended while a program ran on {host}")
        buffer += data
        for kind, _, payload in unpack(buffer):
            if kind == BYE:
                code, _, why = payload.partition(b" ")
                if why:
                    _fail(why.decode(errors="replace"))
                os._exit(int(code))


def _fail(why: str) -> NoReturn:
    try:
        write_all(2, f"hvdrun: {why}\n".encode())
    finally:
        os._exit(FAILED)
