"""What the loop does for `course`, as values."""

from __future__ import annotations

from typing import NamedTuple


class EndAll(NamedTuple):
    """Every rank on every host gets TERM, and KILL after the grace."""

    grace_s: float


class EndHosts(NamedTuple):
    """Every other host ends what is left there in the same way, and then its connection."""

    grace_s: float


class HangUp(NamedTuple):
    """The host ends its ranks: the job was being ended before it was connected."""

    host: str


class SignalMpirun(NamedTuple):
    """To mpirun and what it has started in its session."""

    number: int


class Say(NamedTuple):
    """A line of hvdrun's own."""

    text: str


class Finish(NamedTuple):
    """The loop ends. It kills what is left without asking; then `verdict` says how it went."""


Action = EndAll | EndHosts | HangUp | SignalMpirun | Say | Finish
