"""Knobs whose text is a number or has one behind a word (HVDLITE_CHECK_PARAMETERS=repair:100,
HVDLITE_DETERMINISTIC=virtual:8): hvdrun refuses a wrong text before anything starts, in the words
of the ranks."""

from __future__ import annotations

from hvdrun.errors import UsageError
from hvdrun.knobs import KNOBS, uneven_shares
from hvdrun.plan.local_facts import LocalFacts
from hvdrun.plan.request import Request
from hvdrun.plan.server_count import servers_of


def check(request: Request, facts: LocalFacts) -> str:
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
