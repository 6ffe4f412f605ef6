"""The text of `hvdrun --help`: the options in groups, examples, exit codes."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

import click

from hvdrun.command_line.hvdrun_option import HvdrunOption
from hvdrun.command_line.runtime_options import IdleOption
from hvdrun.errors import exit_codes

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
    ctx: click.Context,
    params: Sequence[click.Parameter],
    formatter: click.HelpFormatter,
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
