"""What a rank's program does, for the timeline: its steps, its backward passes, and its waits.

While no timeline is written, each call here costs one comparison.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from hvdlite.observe import waits

# How many spans are kept between two drains.
CAPACITY = 65536
LONGEST_NAME = 200


class Span(NamedTuple):
    """kind: STEP, BACKWARD or WAIT. optimizer: its name; empty for a wait. number: that of the
    step, of which a backward pass is part: 1 is the first one since the timeline's start. The times
    are those of CLOCK_MONOTONIC."""

    kind: str
    name: str
    optimizer: str
    number: int
    begin_ns: int
    end_ns: int


class _Recording:
    def __init__(self) -> None:
        self.spans: deque[Span] = deque(maxlen=CAPACITY)
        self.begin_ns = time.monotonic_ns()
        # By optimizer: how many steps have ended, and when the last one did.
        self.steps: dict[int, tuple[int, int]] = {}
        # By optimizer: when its backward pass began.
        self.backward: dict[int, int] = {}

    def wait_ended(self, name: str, begin_ns: int) -> None:
        self.spans.append(Span("WAIT", name[:LONGEST_NAME], "", 0, begin_ns, time.monotonic_ns()))


_recording: _Recording | None = None


def record() -> None:
    """Keeps what happens from now on."""
    global _recording
    _recording = _Recording()
    waits.tell(_recording.wait_ended)


def stop() -> None:
    global _recording
    _recording = None
    waits.tell(None)


def drain() -> list[Span]:
    """What has ended since the last call. Any thread."""
    if _recording is None:
        return []
    spans = _recording.spans
    return [spans.popleft() for _ in range(len(spans))]


def backward_began(optimizer: int) -> None:
    """The first gradient of a backward pass is there. optimizer: a number of its own."""
    if _recording is not None:
        _recording.backward[optimizer] = time.monotonic_ns()


def backward_ended(optimizer: int, name: str) -> None:
    """Its last gradient is there; may be called again."""
    recording = _recording
    if recording is None:
        return
    begin_ns = recording.backward.pop(optimizer, None)
    if begin_ns is not None:
        number = recording.steps.get(optimizer, (0, 0))[0] + 1
        name = name[:LONGEST_NAME]
        recording.spans.append(
            Span("BACKWARD", "BACKWARD", name, number, begin_ns, time.monotonic_ns())
        )


def step_ended(optimizer: int, name: str) -> None:
    """An optimizer has made a step, which began when the one before it ended."""
    recording = _recording
    if recording is None:
        return
    number, begin_ns = recording.steps.get(optimizer, (0, recording.begin_ns))
    now = time.monotonic_ns()
    recording.steps[optimizer] = number + 1, now
    name = name[:LONGEST_NAME]
    recording.spans.append(Span("STEP", f"STEP {number + 1}", name, number + 1, begin_ns, now))
