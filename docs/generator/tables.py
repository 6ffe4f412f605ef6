"""The tables that the site generates, as Markdown: variables, exit codes, options.

python -m docs.generator.tables: writes the table of variables into its page, for those who read the
page as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import click

from hvdrun.command_line.cli import cli
from hvdrun.command_line.hvdrun_option import RANGE
from hvdrun.command_line.runtime_options import WITHOUT_EFFECT
from hvdrun.errors import LaunchError
from hvdrun.knobs import KNOBS, Knob

VARIABLES = Path(__file__).resolve().parent.parent / "reference/variables.md"


def variables() -> str:
    """One row for each knob that a user may set."""
    rows = []
    for knob in KNOBS:
        if not knob.internal:
            names = filter(None, (knob.variable, knob.horovod, knob.flag, knob.off_flag))
            default = _default(knob)
            values = _values(knob) + (f"<br>default `{default}`" if default else "")
            rows.append(("<br>".join(f"`{name}`" for name in names), values, knob.help))
    return _table(("variables and options", "values", "meaning"), rows)


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
            one_dash = getattr(option, "one_dash", "")
            short = [one_dash] if one_dash and one_dash not in option.opts else []
            named = ", ".join(f"`{name}`" for name in [*short, *names.split(", ")])
            rows.append((named, RANGE.sub("", text)))
    return _table(("option", "meaning"), rows)


# What the pages may name in `<!-- table: NAME -->`.
TABLES: dict[str, Callable[[], str]] = {
    "variables": variables,
    "without effect": without_effect,
    "exit codes": exit_codes,
    "options": options,
}


def _default(knob: Knob) -> str:
    """Empty where the runtime chooses, as the knob's text says."""
    if isinstance(knob.default, bool):
        return str(int(knob.default))
    if isinstance(knob.default, int):
        return _number(knob, knob.default) if knob.default >= knob.minimum else ""
    return str(knob.default) if knob.default else ""


def _values(knob: Knob) -> str:
    if knob.choices:
        also = f", or a number from 0 to {knob.maximum}" if knob.maximum else ""
        return ", ".join(f"`{choice}`" for choice in knob.choices) + also
    if knob.kind == "bool":
        return f"1, 0 or `{knob.counted}:N`" if knob.counted else "1 or 0"
    if knob.kind in ("int", "counts"):
        each = "numbers" if knob.kind == "counts" else "a number"
        also = f", or `{knob.counted}:N`" if knob.counted else ""
        return f"{each} from {_number(knob, knob.minimum)} to {_number(knob, knob.maximum)}{also}"
    return "text"


def _number(knob: Knob, number: int) -> str:
    """In the unit in which people read sizes, where it is a whole number of these."""
    if knob.name.endswith("_bytes"):
        for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
            if number and number % (1 << power) == 0:
                return f"{number} ({number >> power} {unit})"
    return str(number)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [titles, ["---"] * len(titles), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in cells
    )


def with_variables(page: str) -> str:
    """The page with the table of variables between its marks."""
    begin, end = "<!-- table: variables -->\n", "<!-- end -->"
    table = f"{begin}{variables()}\n{end}"
    return re.sub(f"{begin}.*?{end}", lambda _: table, page, count=1, flags=re.DOTALL)


if __name__ == "__main__":
    VARIABLES.write_text(with_variables(VARIABLES.read_text()))
