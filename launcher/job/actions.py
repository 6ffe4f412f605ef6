"""What the loop does for `course`, as values."""

from __future__ import annotations

from hvdrun.job.value import Value


class EndAll(Value):
    """Every rank on every host gets TERM, and KILL after the grace."""

    grace_s: float


class EndHosts(Value):
    """Every other host ends what is left there in the same way, and then its connection."""

    grace_s: float


class HangUp(Value):
    """The host ends its ranks: the job was being ended before it was connected."""

    host: str


class SignalMpirun(Value):
    """To mpirun and what it has started in its session."""

    number: int


class Say(Value):
    """A line of hvdrun's own."""

    text: str


class Finish(Value):
    """The loop ends. It kills what is left without asking; then `verdict` says how it went."""


Action = EndAll | EndHosts | HangUp | SignalMpirun | Say | Finish
