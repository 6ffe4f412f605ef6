"""hvdrun's own options, a row each; those of the runtime are in `runtime_options`."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from ipaddress import ip_network
from typing import Any

import click
from click.shell_completion import CompletionItem

from hvdrun.command_line.config_file import option_callback
from hvdrun.command_line.hvdrun_option import HvdrunOption, seconds, whole_numbers
from hvdrun.errors import UsageError
from hvdrun.machine.environment import RENDEZVOUS_SECRET
from hvdrun.plan.hosts import parse_hosts
from hvdrun.plan.request import Request
from hvdrun.plan.schedulers import BY_OPTION

# The headings of --help.
WHAT, WHERE, HOW, OUTPUT = "What to run", "Where", "How", "Output"
INSTEAD = "Instead of running"


def files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]


def no_nan(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    """NaN is within every range that click checks."""
    if value != value:
        raise click.BadParameter("'nan' is not a number", ctx, param)
    return value


def _check_master(name: str, value: str) -> None:
    """torch.distributed would reject a wrong one late, or wait without end."""
    if name == "MASTER_PORT":
        expected = "a port from 1 to 65535"
        is_right = bool(re.fullmatch(r"[0-9]{1,5}", value)) and 0 < int(value) < 65536
    else:
        expected = "the name or address of a host; an IPv6 address without brackets"
        is_right = bool(re.fullmatch(r"[A-Za-z0-9_.:%-]+", value))
    if not is_right:
        raise UsageError(
            f"-x {name}={value}: expected {expected}; without -x {name} hvdrun chooses one"
        )


def parse_exports(words: Sequence[str]) -> dict[str, str | None]:
    exports: dict[str, str | None] = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"-x {word}: expected -x VAR or -x VAR=VALUE")
        if name == RENDEZVOUS_SECRET:
            raise UsageError(f"-x {name}: the secret is not for the ranks; leave it out")
        exports[name] = value if sign else None
        if name in ("MASTER_ADDR", "MASTER_PORT") and (sign or name in os.environ):
            _check_master(name, value if sign else os.environ[name])
    return exports


def existing_file(option: str, path: str | None) -> str | None:
    """Its full path. A wrong one is an error also in a job that does not need it."""
    if not path:
        return None
    if not os.path.isfile(path):
        raise UsageError(f"{option} {path}: there is no such file")
    return os.path.abspath(path)


def parse_networks(text: str | None) -> tuple[str, ...]:
    """Names of interfaces, subnets or addresses."""
    words = tuple(word.strip() for word in (text or "").split(",") if word.strip())
    for word in words:
        if "/" in word:
            try:
                ip_network(word, strict=False)
            except ValueError as error:
                raise UsageError(f"--network-interfaces {word}: {error}") from error
        elif not re.fullmatch(r"[A-Za-z0-9_.:@-]+", word):
            raise UsageError(f"--network-interfaces {word}: this can't be the name of an interface")
    return words


def split_words(option: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"{option} {text!r}: {error}") from error


# In the order of --help.
OPTIONS: tuple[HvdrunOption, ...] = (
    HvdrunOption(
        "--num-proc",
        group=WHAT,
        one_dash="-np",
        type=whole_numbers(1, 999_999),
        metavar="N",
        help="Number of processes. Default: all slots.",
    ),
    HvdrunOption(
        "-H",
        "--hosts",
        group=WHERE,
        parse=lambda text: () if text is None else parse_hosts(text),
        one_dash="-hosts",
        from_list=",".join,
        metavar="H1:N,H2:N",
        help="Hosts and their slots: h1:4,user@h2:4,[fd00::1]:2. A host without a number gets one"
        " slot per GPU, or per core if it has no GPU. Default: the hosts of the Slurm, PBS, LSF or"
        " SGE job, else this machine.",
    ),
    HvdrunOption(
        "--hostfile",
        group=WHERE,
        one_dash="-hostfile",
        shell_complete=files,
        metavar="FILE",
        help="Hosts from a file, one per line: 'h1 slots=4' or 'h1:4'.",
    ),
    HvdrunOption(
        "--rendezvous",
        group=WHERE,
        metavar="HOST:PORT",
        help="Every host starts this same command: where node 0, the first of them, is found by the"
        " others. No ssh.",
    ),
    HvdrunOption(
        "--node-rank",
        group=WHERE,
        type=whole_numbers(0),
        metavar="I",
        help="Which of these hosts this is, from 0. Default: NODE_RANK, or JOB_COMPLETION_INDEX.",
    ),
    HvdrunOption(
        "--nodes",
        group=WHERE,
        type=whole_numbers(1),
        metavar="N",
        help="How many hosts start this command. Default: NNODES.",
    ),
    HvdrunOption(
        "--rendezvous-secret-file",
        group=WHERE,
        shell_complete=files,
        metavar="FILE",
        help="The secret that these hosts prove to each other. Default: the variable"
        " HVDLITE_RENDEZVOUS_SECRET.",
    ),
    HvdrunOption(
        "-p",
        "--ssh-port",
        group=WHERE,
        type=whole_numbers(1, 65535),
        metavar="PORT",
        help="ssh's port on the hosts.",
    ),
    HvdrunOption(
        "-i",
        "--ssh-identity-file",
        group=WHERE,
        parse=partial(existing_file, "-i"),
        shell_complete=files,
        metavar="FILE",
        help="ssh's private key.",
    ),
    HvdrunOption(
        "--mpi",
        group=HOW,
        type=click.Choice(["auto", "openmpi", "mpich", "intel", *BY_OPTION]),
        default="auto",
        help="Which MPI. Default: the one beside this Python, else in PATH. slurm: the same,"
        " started by srun.",
    ),
    HvdrunOption(
        "--mpi-args",
        group=HOW,
        parse=partial(split_words, "--mpi-args"),
        from_list=shlex.join,
        metavar="ARGS",
        default="",
        help="More arguments for mpirun, as one word.",
    ),
    HvdrunOption(
        "--binding-args",
        group=HOW,
        parse=partial(split_words, "--binding-args"),
        from_list=shlex.join,
        metavar="ARGS",
        default="",
        help="mpirun's binding arguments, as one word. Default: hvdrun gives each rank its share of"
        " the host's cores.",
    ),
    HvdrunOption(
        "-x",
        "export",
        group=HOW,
        field="exports",
        parse=parse_exports,
        multiple=True,
        metavar="VAR[=VALUE]",
        help="Set a variable for the ranks. They get all exported variables anyway.",
    ),
    HvdrunOption(
        "--network-interfaces",
        "--network-interface",
        group=HOW,
        parse=parse_networks,
        from_list=",".join,
        metavar="NAMES|CIDRS",
        help="Networks for the ranks: eth1,10.0.0.0/16. Default: those that connect all hosts.",
    ),
    HvdrunOption(
        "--start-timeout",
        group=HOW,
        field="start_timeout_s",
        type=seconds(0, open=True),
        callback=no_nan,
        metavar="SECONDS",
        default=60.0,
        envvar="HOROVOD_START_TIMEOUT",
        help="How long to wait for hosts that are not ready yet, and then for the ranks to start."
        " Default: 60.",
    ),
    HvdrunOption(
        "--host-timeout",
        group=HOW,
        field="host_timeout_s",
        type=seconds(2, 86_400),
        callback=no_nan,
        metavar="SECONDS",
        default=Request.host_timeout_s,
        help="A host without a sign of life for so long is lost, and the job ends. Default: 30.",
    ),
    HvdrunOption(
        "--grace-period",
        group=HOW,
        field="grace_period_s",
        type=seconds(0, 1_000_000),
        callback=no_nan,
        metavar="SECONDS",
        help="How long the ranks may take to end after Ctrl-C or a signal to hvdrun. Default: 3"
        " after Ctrl-C, 20 after SIGTERM.",
    ),
    HvdrunOption(
        "--requeue",
        group=HOW,
        is_flag=True,
        help="Ask Slurm to run the job again when hvd.preempted() has ended it.",
    ),
    HvdrunOption(
        "--config-file",
        group=HOW,
        in_config_file=False,
        is_eager=True,
        callback=option_callback,
        metavar="FILE",
        help="Options from a YAML file; options on the command line win.",
    ),
    HvdrunOption(
        "--disable-cache",
        group=HOW,
        is_flag=True,
        help="Check again hosts that passed within the last hour.",
    ),
    HvdrunOption(
        "--output-dir",
        "--output-filename",
        group=OUTPUT,
        metavar="DIR",
        help="Also write each rank's output to DIR/rank.N/stdout and stderr.",
    ),
    HvdrunOption(
        "--metrics-file",
        group=OUTPUT,
        parse=lambda path: os.path.abspath(path) if path else "",
        shell_complete=files,
        metavar="FILE",
        help="Keep the ranks' figures in FILE, for Prometheus' node_exporter; with --summary.",
    ),
    HvdrunOption(
        "--report-file",
        group=OUTPUT,
        shell_complete=files,
        metavar="FILE",
        help="Write how the job went to FILE, in JSON: exit code, cause, rank, host, evidence.",
    ),
    HvdrunOption(
        "--prefix-output-with-timestamp",
        "timestamps",
        group=OUTPUT,
        one_dash="-prefix-timestamp",
        is_flag=True,
        help="Put the time in front of each line, also in the files of --output-dir.",
    ),
    HvdrunOption(
        "--monitor",
        group=OUTPUT,
        is_flag=True,
        help="Show the job live below its output: steps/s, each rank's time, who is slow, hosts."
        " Keys ask for stacks or end the job, so rank 0 reads nothing from the terminal. Without a"
        " terminal: a line now and then.",
    ),
    HvdrunOption(
        "--verbose",
        group=OUTPUT,
        is_flag=True,
        help="Show what hvdrun does, and all that mpirun prints.",
    ),
    HvdrunOption(
        "--dry-run",
        group=INSTEAD,
        is_flag=True,
        help="Print the command that would run; run nothing.",
    ),
    HvdrunOption(
        "--check",
        group=INSTEAD,
        is_flag=True,
        help="Check the hosts and print every finding; run nothing.",
    ),
    HvdrunOption(
        "--check-build",
        group=INSTEAD,
        one_dash="-cb",
        in_config_file=False,
        is_flag=True,
        help="Print what this installation can do.",
    ),
    HvdrunOption(
        "--stacks",
        group=INSTEAD,
        in_config_file=False,
        type=whole_numbers(1),
        metavar="PID",
        help="Print where the ranks of a running job, hvdrun's PID, are in their Python code.",
    ),
    HvdrunOption(
        "--metrics",
        group=INSTEAD,
        in_config_file=False,
        type=whole_numbers(1),
        metavar="PID",
        help="Print how a running job, hvdrun's PID, fares, and which rank is slow (--summary).",
    ),
    HvdrunOption(
        "--json",
        group=INSTEAD,
        in_config_file=False,
        is_flag=True,
        help="With --metrics: print figures for programs.",
    ),
    HvdrunOption(
        "--completion",
        group=INSTEAD,
        in_config_file=False,
        type=click.Choice(["bash", "zsh"]),
        help='Print the completion script of a shell: eval "$(hvdrun --completion bash)".',
    ),
    HvdrunOption(
        "-v",
        "--version",
        group=INSTEAD,
        in_config_file=False,
        is_flag=True,
        help="Print the version.",
    ),
)


def request_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the Request that options set; `given` are the options' values by name."""
    known = {field.name for field in fields(Request)}
    return {o.field: o.parse(given[str(o.name)]) for o in OPTIONS if o.field in known}
