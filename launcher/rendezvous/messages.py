"""What nodes tell each other, and how it is written: kinds of messages, and what some of them have
as payload, as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

# node → node 0, the first message of its own connection: a Hello
HELLO = b"H"
# node 0 → node: it belongs to the job; after how many seconds of silence node 0 counts as lost
WELCOME = b"W"
REFUSED = b"N"  # node 0 → node: it does not belong to the job, and why
# node 0 → node: run a program, and connect its input and output: a Run
RUN = b"R"
# node → node 0, the first message of a connection for a program: the number of its Run
STREAM = b"S"
STREAM_S = 20.0  # how long a node may take until then
# On such a connection: input, output and errors (empty: their end), and the program's exit code
IN, OUT, ERR, EXIT = b"I", b"O", b"E", b"X"
PING = b"P"  # both ways
SIGNAL = b"U"  # node → node 0: a signal that the node's hvdrun got
SAY = b"Y"  # node 0 → node: a line that hvdrun says there
RESULT = b"B"  # node 0 → node: the job's exit code


class NotUnderstood(Exception):
    """A message that no version of ours sends."""


@dataclass(frozen=True)
class Hello:
    """What a node says about itself."""

    version: str  # of hvdlite
    node_rank: int
    nodes: int
    hostname: str
    num_proc: int | None
    gpus: int
    cores: int

    @property
    def slots(self) -> int:
        return self.gpus or self.cores


def pack_hello(hello: Hello) -> bytes:
    return json.dumps(asdict(hello)).encode()


def unpack_hello(payload: bytes) -> Hello:
    """Raises NotUnderstood."""
    given = _object(payload)
    try:
        hello = Hello(**given)
    except TypeError as error:
        raise NotUnderstood(str(error)) from error
    numbers = (hello.node_rank, hello.nodes, hello.gpus, hello.cores, hello.num_proc or 0)
    texts = (hello.version, hello.hostname)
    if not all(type(n) is int and n >= 0 for n in numbers) or not all(
        isinstance(text, str) and text.isprintable() for text in texts
    ):
        raise NotUnderstood("wrong types in a greeting")
    return hello


@dataclass(frozen=True)
class Run:
    number: str
    argv: tuple[str, ...]


def pack_run(run: Run) -> bytes:
    return json.dumps([run.number, *run.argv]).encode()


def unpack_run(payload: bytes) -> Run:
    """Raises NotUnderstood."""
    try:
        number, *argv = json.loads(payload)
    except (ValueError, TypeError, RecursionError) as error:
        raise NotUnderstood(str(error)) from error
    if not argv or not _are_texts([number, *argv]):
        raise NotUnderstood("a program must be a list of words")
    return Run(number, tuple(argv))


def unpack_number(payload: bytes) -> int:
    """Raises NotUnderstood."""
    if not re.fullmatch(rb"-?[0-9]{1,9}", payload):
        raise NotUnderstood("expected a number")
    return int(payload)


def unpack_seconds(payload: bytes) -> float:
    """Raises NotUnderstood."""
    try:
        return float(payload)
    except ValueError as error:
        raise NotUnderstood(str(error)) from error


def _are_texts(words: Sequence[Any]) -> bool:
    return all(isinstance(word, str) for word in words)


def _object(payload: bytes) -> dict[str, Any]:
    try:
        found = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise NotUnderstood(str(error)) from error
    if not isinstance(found, dict):
        raise NotUnderstood("expected an object")
    return found
