"""`python edited_facts.py PATTERN TEXT …`, as a filter between a host agent and hvdrun: changes
what the agent answers to preflight, and passes everything else on."""

import os
import re
import sys

from hvdrun.agent.frames import CHUNK, FACTS, HELLO, frame, unpack, write_all


def main(edits: list[str]) -> None:
    buffer, talks, answered = bytearray(), False, False
    while data := os.read(0, CHUNK):
        if answered:
            write_all(1, data)
            continue
        buffer += data
        if not talks and HELLO in buffer:
            end = buffer.index(HELLO) + len(HELLO)
            write_all(1, bytes(buffer[:end]))
            del buffer[:end]
            talks = True
        for kind, rank, payload in unpack(buffer) if talks else ():
            text = payload.decode()
            for pattern, new in zip(edits[::2], edits[1::2], strict=True):
                text = re.sub(pattern, new, text)
            write_all(1, frame(kind, rank, text.encode()))
            answered = kind == FACTS
            break
        if answered:
            write_all(1, bytes(buffer))
    if not talks:
        write_all(1, bytes(buffer))


if __name__ == "__main__":
    main(sys.argv[1:])
