"""Faults on purpose (HVDLITE_FAULT): hvdrun refuses a wrong text before anything starts, and says
that the job has faults."""

from __future__ import annotations

from hvdrun import faults
from hvdrun.errors import UsageError
from hvdrun.plan.local_facts import LocalFacts
from hvdrun.plan.request import Request


def check(request: Request, facts: LocalFacts) -> str:
    """The line that hvdrun says at the start; empty without faults.

    Raises:
        UsageError: The text can't be parsed, or names a rank that the job does not have.
    """
    text = (request.variable(faults.VARIABLE, facts.environ) or "").strip()
    num_proc = request.num_proc
    try:
        found = faults.parse(text)
    except ValueError as error:
        raise UsageError(f"{faults.VARIABLE}: {error}") from None
    for fault in found:
        if num_proc and fault.rank >= num_proc:
            raise UsageError(
                f"{faults.VARIABLE}: {fault.kind}: rank={fault.rank}, but the job has {num_proc} "
                f"ranks; expected a number from 0 to {num_proc - 1}"
            )
    if not found:
        return ""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text)
    return f"FAULTS ARE INJECTED: {faults.VARIABLE} makes this job fail on purpose: {shown}"
