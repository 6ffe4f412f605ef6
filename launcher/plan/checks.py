"""What hvdrun refuses before anything starts, in the words of the ranks, which would find out
later: too many servers, wrong values of knobs that hold a number, wrong faults."""

from __future__ import annotations

from collections.abc import Mapping

from hvdrun import faults
from hvdrun.errors import UsageError
from hvdrun.knobs import KNOBS, MOST_DIGITS, uneven_shares
from hvdrun.plan.facts import LocalFacts
from hvdrun.plan.request import Request

_VARIABLE = "HVDLITE_SERVERS"


def check_servers(request: Request, facts: LocalFacts) -> None:
    """Raises UsageError if no process is left to be a worker. A variable that is no number is an
    error of `hvdlite.init`."""
    number, num_proc = servers_of(request, facts.environ), request.num_proc
    if num_proc and number >= num_proc:
        what = "--servers" if _VARIABLE in request.settings else f"{_VARIABLE}="
        raise UsageError(
            f"{what} {number}: the job has {num_proc} processes, servers included, so no worker is"
            f" left; use -np {number + 1} or more, or fewer servers"
        )


def servers_of(request: Request, environ: Mapping[str, str]) -> int:
    """How many of the processes are servers; 0 where the variable is no number."""
    given = (request.variable(_VARIABLE, environ) or "").strip()
    return int(given) if given.isdecimal() and len(given) <= MOST_DIGITS else 0


def check_counted_knobs(request: Request, facts: LocalFacts) -> str:
    """What hvdrun says at the start; empty if there is nothing to say.

    A number of ranks that does not divide that of the virtual ranks is no error here: the script
    may make a smaller world of some of them.

    Raises:
        UsageError: A text can't be parsed.
    """
    values: dict[str, str] = {}
    for knob in KNOBS:
        text = request.variable(knob.variable, facts.environ)
        if not knob.counted or text is None:
            continue
        try:
            values[knob.name] = str(knob.parse_variable(knob.variable, text))
        except ValueError as error:
            raise UsageError(str(error)) from None
    word, _, number = values.get("deterministic", "").partition(":")
    if request.num_proc is None or word != "virtual":
        return ""
    servers = servers_of(request, facts.environ)
    warning = uneven_shares(int(number), request.num_proc - servers)
    are = "is a server" if servers == 1 else "are servers"
    of = f" ({servers} of the {request.num_proc} processes {are})" if servers else ""
    return warning and warning + of


def check_faults(request: Request, facts: LocalFacts) -> str:
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
