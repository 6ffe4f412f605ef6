"""What comes of a command that asks a host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Reply:
    """The result of one command."""

    answer: dict[str, Any] | None
    exit_code: int | None  # None: hvdrun ended it, at the time limit or after its answer
    stderr: str
    took_s: float
    clock_skew_s: float = 0.0  # how far the host's clock is outside of the call's begin and end
    stdout: str = ""  # its end, if there is no answer
    came_at_the_end: bool = False  # the answer, soon after the end of the command's input
