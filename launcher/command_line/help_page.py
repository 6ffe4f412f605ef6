"""What `hvdrun --help` shows: the options in groups, examples, exit codes."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence

import click

from hvdrun.command_line.runtime_options import IdleOption, KnobOption
from hvdrun.errors import exit_codes

GROUPS = {
    "What to run": ("num_proc",),
    "Where": ("hosts", "hostfile", "ssh_port", "ssh_identity_file"),
    "How": (
        *("mpi", "mpi_args", "binding_args", "export", "network_interfaces", "start_timeout"),
        *("config_file", "disable_cache"),
    ),
    "Output": ("output_dir", "timestamps", "verbose"),
    "Instead of running": ("dry_run", "check", "check_build", "completion", "version"),
}

EXAMPLES = """\
hvdrun -np 4 python train.py                          four processes on this machine
hvdrun -np 8 -H server1:4,server2:4 python train.py   four on each of two hosts, over ssh
hvdrun --hostfile hosts.txt python train.py           all slots of the hosts in a file
hvdrun -H server1:4,server2:4 --check                 are these hosts ready? starts nothing
hvdrun -np 2 --dry-run python train.py                show what would run
hvdrun -np 2 --output-dir logs python train.py        a file for each rank, too
hvdrun -np 2 -x TOKEN -x LEVEL=3 python train.py      variables for the ranks
hvdrun --check-build                                  what this installation can do"""

CODES = f"""\
0   every rank ended with 0
n   of the rank that failed first; 128+n if signal n ended it, or hvdrun itself
{exit_codes()}"""

OPTION_COLUMNS = 32
# What click adds to the help of a number: the texts say it where it matters.
RANGE = re.compile(r"\s*\[[0-9<=]*x[<>]=?[0-9.]*\]$")


def write_options(
    ctx: click.Context,
    params: Sequence[click.Parameter],
    single_dash: Mapping[str, str],
    formatter: click.HelpFormatter,
) -> None:
    """single_dash: long options with one dash, and what they stand for."""
    short = {long: one for one, long in single_dash.items() if long != f"-{one}"}
    records: dict[str | None, tuple[str, str]] = {}
    for param in params:
        if record := param.get_help_record(ctx):
            names, text = record
            one = short.get(names.split()[0].rstrip(","))
            names = f"{one}, {names}" if one else names
            records[param.name] = names, RANGE.sub("", text)
    knobs = [param.name for param in params if isinstance(param, KnobOption)]
    for title, names_in_group in {**GROUPS, "Runtime": knobs}.items():
        with formatter.section(title):
            rows = [r for name in names_in_group if (r := records.get(name))]
            formatter.write_dl(rows, col_max=OPTION_COLUMNS)
    with formatter.section("Taken for horovodrun's users, and without effect"):
        idle = sorted(param.opts[0] for param in params if isinstance(param, IdleOption))
        width = formatter.width - formatter.current_indent
        _write(formatter, textwrap.wrap(" ".join(idle), width, break_on_hyphens=False))


def write_epilog(formatter: click.HelpFormatter) -> None:
    for title, text in (("Examples", EXAMPLES), ("Exit codes", CODES)):
        with formatter.section(title):
            _write(formatter, text.splitlines())


def _write(formatter: click.HelpFormatter, lines: Sequence[str]) -> None:
    """As they are: click would fill the paragraphs."""
    for line in lines:
        formatter.write(f"{'':{formatter.current_indent}}{line}\n")
