"""An option of hvdrun: one row says everything about it. And the text of `hvdrun --help`: the
options in groups, examples, exit codes."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click

from hvdrun.errors import exit_codes


def whole_numbers(minimum: int, maximum: int | None = None) -> click.IntRange:
    """The type of an option. Its name stands in click's error for a text that is no number."""
    kind = click.IntRange(minimum, maximum)
    kind.name = f"whole number from {minimum}" + ("" if maximum is None else f" to {maximum}")
    return kind


def seconds(minimum: float, maximum: float | None = None, open: bool = False) -> click.FloatRange:
    kind = click.FloatRange(minimum, maximum, min_open=open)
    kind.name = "number of seconds"
    return kind


class HvdrunOption(click.Option):
    """An option with its place in the help, in the Request and in the config file.

    group: the heading of `--help` that it stands under; without one it is not listed.
    field: of the Request; by default the one that has the option's name, if there is one.
    parse: from the option's value to the field's.
    one_dash: a spelling with one dash that Horovod's users type.
    from_list: makes a list of the config file the option's text.
    """

    def __init__(
        self,
        *spellings: str,
        group: str = "",
        field: str = "",
        parse: Callable[[Any], Any] = lambda value: value,
        one_dash: str = "",
        from_list: Callable[[Iterable[str]], str] | None = None,
        in_config_file: bool = True,
        **of_click: Any,
    ) -> None:
        super().__init__(spellings, **of_click)
        self.group = group
        self.field = field or str(self.name)
        self.parse = parse
        self.one_dash = one_dash
        self.from_list = from_list
        self.in_config_file = in_config_file

    @property
    def long_spelling(self) -> str:
        return next(spelling for spelling in self.opts if spelling.startswith("--"))


TYPES: dict[str, click.ParamType[Any]] = {
    "int": click.INT,
    "float": click.FLOAT,
    "text": click.STRING,
}


class IdleOption(click.Option):
    """Does nothing; `why` is the reason."""

    def __init__(self, flag: str, takes: str, why: str) -> None:
        self.why = why
        if takes:
            super().__init__([flag], type=TYPES[takes], hidden=True)
        else:
            super().__init__([flag], is_flag=True, hidden=True)


EXAMPLES = """\
hvdrun -np 4 python train.py                          four processes on this machine
hvdrun -np 8 -H server1:4,server2:4 python train.py   four on each of two hosts, over ssh
hvdrun --hostfile hosts.txt python train.py           all slots of the hosts in a file
hvdrun -np 8 --rendezvous h0 --nodes 2 --node-rank 1 python train.py   on each of two hosts, no ssh
hvdrun -H server1:4,server2:4 --check                 are these hosts ready? starts nothing
hvdrun -np 2 --dry-run python train.py                show what would run
hvdrun -np 2 --output-dir logs python train.py        a file for each rank, too
hvdrun -np 2 -x TOKEN -x LEVEL=3 python train.py      variables for the ranks
hvdrun --check-build                                  what this installation can do"""

CODES = f"""\
0   every rank ended with 0
n   the exit code of the rank that failed first; 128+n if signal n ended it, or hvdrun
{exit_codes()}"""

OPTION_COLUMNS = 32
# The range that click adds to the help of a number: the texts give it where it matters.
RANGE = re.compile(r"\s*\[[0-9<=]*x[<>]=?[0-9.]*\]$")


def write_options(
    ctx: click.Context, params: Sequence[click.Parameter], formatter: click.HelpFormatter
) -> None:
    groups: dict[str, list[tuple[str, str]]] = {}
    for param in params:
        record = param.get_help_record(ctx)
        if isinstance(param, HvdrunOption) and param.group and record:
            names, text = record
            if param.one_dash and param.one_dash != f"-{param.long_spelling[2:]}":
                names = f"{param.one_dash}, {names}"
            groups.setdefault(param.group, []).append((names, RANGE.sub("", text)))
    for title, rows in groups.items():
        with formatter.section(title):
            formatter.write_dl(rows, col_max=OPTION_COLUMNS)
    with formatter.section("Accepted for horovodrun's users, without effect"):
        idle = sorted(param.opts[0] for param in params if isinstance(param, IdleOption))
        width = formatter.width - formatter.current_indent
        _write(formatter, textwrap.wrap(" ".join(idle), width, break_on_hyphens=False))


def write_epilog(formatter: click.HelpFormatter) -> None:
    for title, text in (("Examples", EXAMPLES), ("Exit codes", CODES)):
        with formatter.section(title):
            _write(formatter, text.splitlines())


def _write(formatter: click.HelpFormatter, lines: Sequence[str]) -> None:
    """Writes the lines as they are: click would reflow them."""
    for line in lines:
        formatter.write(f"{'':{formatter.current_indent}}{line}\n")
