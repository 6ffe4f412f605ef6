"""Knobs whose text is a number or has one behind a word (HVDLITE_CHECK_PARAMETERS=repair:100,
HVDLITE_DETERMINISTIC=virtual:8): hvdrun refuses a wrong text before anything starts, in the words
of the ranks."""

from __future__ import annotations

from collections.abc import Mapping

from hvdrun.errors import UsageError
from hvdrun.knobs import KNOBS, uneven_shares
from hvdrun.plan.request import Request
from hvdrun.plan.server_count import servers_of


def check(request: Request, environ: Mapping[str, str]) -> dict[str, str]:
    """The values, by the knob's name. environ: hvdrun's own.

    Raises:
        UsageError: A text can't be parsed.
    """
    values: dict[str, str] = {}
    for knob in KNOBS:
        text = request.variable(knob.variable, environ)
        if not knob.counted or text is None:
            continue
        try:
            values[knob.name] = str(knob.parse_variable(knob.variable, text))
        except ValueError as error:
            raise UsageError(str(error)) from None
    return values


def warning(request: Request, num_proc: int, environ: Mapping[str, str]) -> str:
    """What hvdrun says at the start; empty if there is nothing to say.

    A number of ranks that does not divide that of the virtual ranks is no error here: the script
    may make a smaller world of some of them.
    """
    word, _, number = check(request, environ).get("deterministic", "").partition(":")
    servers = servers_of(request, environ)
    text = uneven_shares(int(number), num_proc - servers) if word == "virtual" else ""
    are = "is a server" if servers == 1 else "are servers"
    return f"{text} ({servers} of the {num_proc} processes {are})" if text and servers else text
