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
what = partial(HvdrunOption, group="What to run")
where = partial(HvdrunOption, group="Where")
how = partial(HvdrunOption, group="How")
output = partial(HvdrunOption, group="Output")
instead = partial(HvdrunOption, group="Instead of running")


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
    what(
        "--num-proc",
        one_dash="-np",
        type=whole_numbers(1, 999_999),
        metavar="N",
        help="Number of processes. Default: all slots.",
    ),
    where(
        "-H",
        "--hosts",
        parse=lambda text: () if text is None else parse_hosts(text),
        one_dash="-hosts",
        from_list=",".join,
        metavar="H1:N,H2:N",
        help="Hosts and their slots: h1:4,user@h2:4,[fd00::1]:2. A host without a number gets one"
        " slot per GPU, or per core if it has no GPU. Default: the hosts of the Slurm, PBS, LSF or"
        " SGE job, else this machine.",
    ),
    where(
        "--hostfile",
        one_dash="-hostfile",
        shell_complete=files,
        metavar="FILE",
        help="Hosts from a file, one per line: 'h1 slots=4' or 'h1:4'.",
    ),
    where(
        "--rendezvous",
        metavar="HOST:PORT",
        help="Every host starts this same command: where node 0, the first of them, is found by the"
        " others. No ssh.",
    ),
    where(
        "--node-rank",
        type=whole_numbers(0),
        metavar="I",
        help="Which of these hosts this is, from 0. Default: NODE_RANK, or JOB_COMPLETION_INDEX.",
    ),
    where(
        "--nodes",
        type=whole_numbers(1),
        metavar="N",
        help="How many hosts start this command. Default: NNODES.",
    ),
    where(
        "--rendezvous-secret-file",
        shell_complete=files,
        metavar="FILE",
        help="The secret that these hosts prove to each other. Default: the variable"
        " HVDLITE_RENDEZVOUS_SECRET.",
    ),
    where(
        "-p",
        "--ssh-port",
        type=whole_numbers(1, 65535),
        metavar="PORT",
        help="ssh's port on the hosts.",
    ),
    where(
        "-i",
        "--ssh-identity-file",
        parse=partial(existing_file, "-i"),
        shell_complete=files,
        metavar="FILE",
        help="ssh's private key.",
    ),
    how(
        "--mpi",
        type=click.Choice(["auto", "openmpi", "mpich", "intel", *BY_OPTION]),
        default="auto",
        help="Which MPI. Default: the one beside this Python, else in PATH. slurm: the same,"
        " started by srun.",
    ),
    how(
        "--mpi-args",
        parse=partial(split_words, "--mpi-args"),
        from_list=shlex.join,
        metavar="ARGS",
        default="",
        help="More arguments for mpirun, as one word.",
    ),
    how(
        "--binding-args",
        parse=partial(split_words, "--binding-args"),
        from_list=shlex.join,
        metavar="ARGS",
        default="",
        help="mpirun's binding arguments, as one word. Default: hvdrun gives each rank its share of"
        " the host's cores.",
    ),
    how(
        "-x",
        "export",
        field="exports",
        parse=parse_exports,
        multiple=True,
        metavar="VAR[=VALUE]",
        help="Set a variable for the ranks. They get all exported variables anyway.",
    ),
    how(
        "--network-interfaces",
        "--network-interface",
        parse=parse_networks,
        from_list=",".join,
        metavar="NAMES|CIDRS",
        help="Networks for the ranks: eth1,10.0.0.0/16. Default: those that connect all hosts.",
    ),
    how(
        "--start-timeout",
        field="start_timeout_s",
        type=seconds(0, open=True),
        callback=no_nan,
        metavar="SECONDS",
        default=60.0,
        envvar="HOROVOD_START_TIMEOUT",
        help="How long to wait for hosts that are not ready yet, and then for the ranks to start."
        " Default: 60.",
    ),
    how(
        "--host-timeout",
        field="host_timeout_s",
        type=seconds(2, 86_400),
        callback=no_nan,
        metavar="SECONDS",
        default=Request.host_timeout_s,
        help="A host without a sign of life for so long is lost, and the job ends. Default: 30.",
    ),
    how(
        "--grace-period",
        field="grace_period_s",
        type=seconds(0, 1_000_000),
        callback=no_nan,
        metavar="SECONDS",
        help="How long the ranks may take to end after Ctrl-C or a signal to hvdrun. Default: 3"
        " after Ctrl-C, 20 after SIGTERM.",
    ),
    how(
        "--requeue",
        is_flag=True,
        help="Ask Slurm to run the job again when hvd.preempted() has ended it.",
    ),
    how(
        "--config-file",
        in_config_file=False,
        is_eager=True,
        callback=option_callback,
        metavar="FILE",
        help="Options from a YAML file; options on the command line win.",
    ),
    how(
        "--disable-cache", is_flag=True, help="Check again hosts that passed within the last hour."
    ),
    output(
        "--output-dir",
        "--output-filename",
        metavar="DIR",
        help="Also write each rank's output to DIR/rank.N/stdout and stderr.",
    ),
    output(
        "--metrics-file",
        parse=lambda path: os.path.abspath(path) if path else "",
        shell_complete=files,
        metavar="FILE",
        help="Keep the ranks' figures in FILE, for Prometheus' node_exporter; with --summary.",
    ),
    output(
        "--report-file",
        shell_complete=files,
        metavar="FILE",
        help="Write how the job went to FILE, in JSON: exit code, cause, rank, host, evidence.",
    ),
    output(
        "--prefix-output-with-timestamp",
        "timestamps",
        one_dash="-prefix-timestamp",
        is_flag=True,
        help="Put the time in front of each line, also in the files of --output-dir.",
    ),
    output(
        "--monitor",
        is_flag=True,
        help="Show the job live below its output: steps/s, each rank's time, who is slow, hosts."
        " Keys ask for stacks or end the job, so rank 0 reads nothing from the terminal. Without a"
        " terminal: a line now and then.",
    ),
    output("--verbose", is_flag=True, help="Show what hvdrun does, and all that mpirun prints."),
    instead("--dry-run", is_flag=True, help="Print the command that would run; run nothing."),
    instead("--check", is_flag=True, help="Check the hosts and print every finding; run nothing."),
    instead(
        "--check-build",
        one_dash="-cb",
        in_config_file=False,
        is_flag=True,
        help="Print what this installation can do.",
    ),
    instead(
        "--stacks",
        in_config_file=False,
        type=whole_numbers(1),
        metavar="PID",
        help="Print where the ranks of a running job, hvdrun's PID, are in their Python code.",
    ),
    instead(
        "--metrics",
        in_config_file=False,
        type=whole_numbers(1),
        metavar="PID",
        help="Print how a running job, hvdrun's PID, fares, and which rank is slow (--summary).",
    ),
    instead(
        "--json",
        in_config_file=False,
        is_flag=True,
        help="With --metrics: print figures for programs.",
    ),
    instead(
        "--completion",
        in_config_file=False,
        type=click.Choice(["bash", "zsh"]),
        help='Print the completion script of a shell: eval "$(hvdrun --completion bash)".',
    ),
    instead("-v", "--version", in_config_file=False, is_flag=True, help="Print the version."),
)


def request_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the Request that options set; `given` are the options' values by name."""
    known = {field.name for field in fields(Request)}
    return {o.field: o.parse(given[str(o.name)]) for o in OPTIONS if o.field in known}
