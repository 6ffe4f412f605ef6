"""The tables that the site generates, as Markdown: variables, exit codes, options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import click

from hvdrun.command_line.cli import cli
from hvdrun.errors import LaunchError
from hvdrun.knobs import KNOBS, WITHOUT_EFFECT, Knob


def variables() -> str:
    """One row for each knob that a user may set."""
    rows = [
        (
            f"`{knob.variable}`" + (f"<br>`{knob.horovod}`" if knob.horovod else ""),
            _flags(knob),
            f"`{_default(knob)}`" if _default(knob) else "",
            _values(knob),
            knob.help,
        )
        for knob in KNOBS
        if not knob.internal
    ]
    return _table(("variable", "option of hvdrun", "default", "values", "meaning"), rows)


def without_effect() -> str:
    """Horovod's variables and options that are accepted and do nothing."""
    rows = [
        (f"`{flag}`", f"`{variable}`" if variable else "", why)
        for flag, variable, _, why in WITHOUT_EFFECT
    ]
    return _table(("option", "variable in Horovod", "why it has no effect"), rows)


def exit_codes() -> str:
    """hvdrun's own failures."""
    kinds = LaunchError.__subclasses__()
    rows = [(str(kind.code), f"`{kind.__name__}`", kind.cause) for kind in kinds]
    return _table(("exit code", "error", "cause"), rows)


def options() -> str:
    """What `hvdrun --help` lists, each option with its text."""
    context = click.Context(cli, info_name="hvdrun", terminal_width=1000)
    rows = []
    for option in cli.params:
        record = option.get_help_record(context)
        if record and getattr(option, "help", None):
            names, text = record
            names = ", ".join(f"`{name}`" for name in names.split(", "))
            rows.append((names, text))
    return _table(("option", "meaning"), rows)


# What the pages may name in `<!-- table: NAME -->`.
TABLES: dict[str, Callable[[], str]] = {
    "variables": variables,
    "without effect": without_effect,
    "exit codes": exit_codes,
    "options": options,
}


def _flags(knob: Knob) -> str:
    return "<br>".join(f"`{flag}`" for flag in (knob.flag, knob.off_flag) if flag)


def _default(knob: Knob) -> str:
    if knob.kind == "bool":
        return "1" if knob.default else "0"
    if knob.kind == "int" and isinstance(knob.default, int) and knob.default < knob.minimum:
        return ""  # chosen by the runtime, as the text says
    return str(knob.default) if knob.default else "0" if knob.kind == "int" else ""


def _values(knob: Knob) -> str:
    if knob.choices:
        return ", ".join(f"`{choice}`" for choice in knob.choices)
    if knob.kind == "bool":
        return "1 or 0"
    if knob.kind in ("int", "counts"):
        each = "numbers" if knob.kind == "counts" else "a number"
        return f"{each} from {knob.minimum} to {knob.maximum}"
    return "text"


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [titles, ["---"] * len(titles), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in cells
    )
