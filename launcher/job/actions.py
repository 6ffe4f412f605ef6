"""The actions that `course` asks the loop for, as values."""

from __future__ import annotations

import signal
from dataclasses import dataclass


@dataclass(slots=True)
class EndAll:
    """Every rank on every host gets the signals of `agent.signals.steps`."""

    grace_s: float
    first: int = signal.SIGTERM  # or INT


@dataclass(slots=True)
class EndHosts:
    """Every other host ends what is left there in the same way, and then its connection."""

    grace_s: float


@dataclass(slots=True)
class Release:
    """All ranks that were to be ended have ended: MPI may notice."""


@dataclass(slots=True)
class PassOn:
    """Every rank gets the signal if it has a handler for it. Its keeper answers."""

    number: int
    request: int


@dataclass(slots=True)
class HangUp:
    """The host ends its ranks: it connected only after the job had begun to end."""

    host: str


@dataclass(slots=True)
class SignalMpirun:
    """Sends a signal to mpirun and to everything it started in its session."""

    number: int


@dataclass(slots=True)
class Look:
    """Asks the keepers of these ranks what the ranks do now; their answers are RankLooked.
    with_stack: and where they are in their Python code; with_box: and before that, as
    RankRecorded, their last operations."""

    ranks: tuple[int, ...]
    with_stack: bool = False
    with_box: bool = False


@dataclass(slots=True)
class Answer:
    """Answers whoever has asked about the job."""

    asker: int
    text: str


@dataclass(slots=True)
class Say:
    """Shows a line of hvdrun's own."""

    text: str


@dataclass(slots=True)
class Finish:
    """The loop ends and kills at once what is left. Then `verdict` decides how the job went."""


Action = EndAll | EndHosts | Release | PassOn | HangUp | SignalMpirun | Look | Answer | Say | Finish
