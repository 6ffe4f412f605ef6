"""The messages between workers and servers: a header of fixed size, and what follows it.

Gradients and parameters follow as they lie in memory. Pickles travel only when something is set up,
saved or loaded, and when options change; both ends are ranks of one job.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import torch

_MAGIC = b"hvA1"
_HEADER = struct.Struct("<4sBBHIIqqqqqq")
HEADER_BYTES = _HEADER.size


class Kind(IntEnum):
    # From a worker.
    SETUP = 1  # a pickled record of an optimizer, then the values
    ATTACH = 2  # this worker is going to use it
    PUSH = 3  # gradients of a step; asks for parameters
    PULL = 4  # asks for the newest parameters
    OPTIONS = 5  # pickled options of the parameter groups
    STATE = 6  # asks for the optimizer's state
    LOAD = 7  # a pickled state, then the values
    LOOK = 8  # asks for the clocks
    JOIN = 9
    BYE = 10  # the worker leaves: its last message
    RELEASE = 11  # this worker does not use an optimizer any more
    RESUME = 12  # without servers: all have joined; this worker counts again, with its clock
    # From the server that decides to the others of an optimizer: whose gradients make a step, or
    # whose come too late; and that it has ended.
    DECIDED = 16
    END = 17
    # From a server to a worker.
    STEP = 32  # the parameters that a PUSH has asked for
    ANSWER = 33  # to anything else


class Form(IntEnum):
    """How parameters or gradients follow."""

    NOTHING = 0
    WHOLE = 1  # the memory of all parts, in one message
    PARTS = 2  # a table, then the parts that it names
    SHARED = 3  # they lie in memory that both ends share


# In a table, for each part: nothing, all of it, or from 0 on the number of its rows.
ABSENT = -1
DENSE = -2

# Tags. A worker sends headers with one and everything else with another; a server's depend on the
# optimizer, so that what several optimizers wait for is not mixed.
REQUEST_TAG = 1
BODY_TAG = 2
_TAGS_PER_OPTIMIZER = 8


def step_tag(optimizer: int) -> int:
    return _TAGS_PER_OPTIMIZER * (optimizer + 1)


def whole_tag(optimizer: int) -> int:
    """Of parameters in the form WHOLE: their receive may be posted before their header comes."""
    return step_tag(optimizer) + 1


def parts_tag(optimizer: int) -> int:
    return step_tag(optimizer) + 2


def answer_tag(optimizer: int) -> int:
    return step_tag(optimizer) + 3


def answer_body_tag(optimizer: int) -> int:
    return step_tag(optimizer) + 4


class BadMessage(RuntimeError):
    """A header that no correct peer sends."""


@dataclass(frozen=True)
class Header:
    """worker: the number of the worker that sends it or gets it.
    optimizer: the number of the optimizer.
    parts: how many parts the sender has there; digest: of their layout.
    clock: a step's, or a round's, number.
    needs: a PUSH: how many steps of every worker the parameters must contain that it asks for.
    version: of parameters: how often those of this server had been changed.
    body_bytes: of what follows, beside tables and parts.
    """

    kind: Kind
    worker: int
    optimizer: int = 0
    form: Form = Form.NOTHING
    parts: int = 0
    digest: int = 0
    clock: int = 0
    needs: int = 0
    version: int = 0
    body_bytes: int = 0

    def tensor(self) -> torch.Tensor:
        return torch.frombuffer(
            bytearray(
                _HEADER.pack(
                    *(_MAGIC, self.kind, self.form, self.optimizer, self.worker, self.parts),
                    *(self.digest, self.clock, self.needs, self.version, self.body_bytes, 0),
                )
            ),
            dtype=torch.uint8,
        )


def read_header(tensor: torch.Tensor, worker: int) -> Header:
    """worker: whose message, or to whom.

    Raises:
        BadMessage: It can't be one.
    """
    magic, kind, form, optimizer, of, parts, digest, clock, needs, version, size_bytes, zero = (
        _HEADER.unpack(tensor.numpy().tobytes())
    )
    if magic != _MAGIC or zero or of != worker or min(clock, needs + 1, version, size_bytes) < 0:
        raise BadMessage(f"a header that is none, where one of worker {worker} was expected")
    try:
        return Header(
            *(Kind(kind), of, optimizer, Form(form), parts, digest),
            *(clock, needs, version, size_bytes),
        )
    except ValueError as error:
        raise BadMessage(f"a header of worker {worker} with {error}") from None


def empty_header() -> torch.Tensor:
    return torch.empty(HEADER_BYTES, dtype=torch.uint8)


def bytes_tensor(data: bytes) -> torch.Tensor:
    """data: not empty."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
