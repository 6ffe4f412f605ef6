"""What nodes tell each other, in frames (see `agent.frames`) whose kinds are these, and what some
of them have as payload, as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hvdrun.agent.frames import BadFrame

# node → node 0, the first message of its own connection: a Hello
HELLO = b"H"
# node 0 → node: it belongs to the job; after how many milliseconds of silence node 0 counts as
# lost. REFUSED: it does not, and why
WELCOME = b"W"
# node 0 → node: run a program, and connect its input and output: a Run
RUN = b"R"
# node → node 0, the first message of a connection for a program: the number of its Run. Then STDIN,
# OUT and ERR (empty: their end), and EXIT with the program's exit code
STREAM = b"S"
STREAM_S = 20.0  # how long a node may take until then
SAY = b"Y"  # node 0 → node: a line that hvdrun says there
# PING both ways; node → node 0: SIGNAL, which the node's hvdrun got; node 0 → node: BYE, with the
# job's exit code


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
    """Raises BadFrame."""
    given = _object(payload)
    try:
        hello = Hello(**given)
    except TypeError as error:
        raise BadFrame(str(error)) from error
    numbers = (hello.node_rank, hello.nodes, hello.gpus, hello.cores, hello.num_proc or 0)
    texts = (hello.version, hello.hostname)
    if not all(type(n) is int and n >= 0 for n in numbers) or not all(
        isinstance(text, str) and text.isprintable() for text in texts
    ):
        raise BadFrame("wrong types in a greeting")
    return hello


@dataclass(frozen=True)
class Run:
    number: str
    argv: tuple[str, ...]


def pack_run(run: Run) -> bytes:
    return json.dumps([run.number, *run.argv]).encode()


def unpack_run(payload: bytes) -> Run:
    """Raises BadFrame."""
    try:
        number, *argv = json.loads(payload)
    except (ValueError, TypeError, RecursionError) as error:
        raise BadFrame(str(error)) from error
    if not argv or not _are_texts([number, *argv]):
        raise BadFrame("a program must be a list of words")
    return Run(number, tuple(argv))


def _are_texts(words: Sequence[Any]) -> bool:
    return all(isinstance(word, str) for word in words)


def _object(payload: bytes) -> dict[str, Any]:
    try:
        found = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise BadFrame(str(error)) from error
    if not isinstance(found, dict):
        raise BadFrame("expected an object")
    return found
