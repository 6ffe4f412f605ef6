"""hvdrun's command line."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from hvdrun.command_line import config_file
from hvdrun.command_line.runtime_options import idle_notes, runtime_options, settings
from hvdrun.errors import (
    HostListError,
    LaunchError,
    MpiMismatch,
    NoMpi,
    UsageError,
)
from hvdrun.output.terminal import open_standard_files
from hvdrun.plan import allocation, facts, flavour, slurm
from hvdrun.plan import command as commands
from hvdrun.plan.hosts import Host, parse_hostfile, parse_hosts
from hvdrun.plan.request import Request

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from hvdrun.preflight.preflight import Preflight

# Horovod's users type these with one dash.
SINGLE_DASH = {
    "-np": "--num-proc",
    "-cb": "--check-build",
    "-hostfile": "--hostfile",
    "-hosts": "--hosts",
    "-prefix-timestamp": "--prefix-output-with-timestamp",
}

CTRL_C = 130  # the exit code of who ends by SIGINT

# As a job of one rank, so that MPI is seen at work.
CHECK_BUILD = (sys.executable, "-m", "hvdlite.check_build")


class HvdrunCommand(click.Command):
    """Options in groups; the first word that is no option begins the program's own command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, double_dashes(self, ctx, args))
        config_file.prefer_command_line(ctx)
        return rest

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Within the program's own command, of which hvdrun knows nothing: files."""
        if not ctx.params.get("command"):
            return super().shell_complete(ctx, incomplete)
        (words,) = (p for p in self.params if isinstance(p, click.Argument))
        return words.shell_complete(ctx, incomplete)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from hvdrun.command_line import help_page

        help_page.write_options(ctx, self.get_params(ctx), SINGLE_DASH, formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from hvdrun.command_line import help_page

        help_page.write_epilog(formatter)


def files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def no_nan(ctx: click.Context, param: click.Parameter, value: float) -> float:
    """It is within any range."""
    if value != value:
        raise click.BadParameter("'nan' is no number", ctx, param)
    return value


def completion_script(command: click.Command, shell: str) -> str:
    """For the shell to source."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    return kind(command, {}, "hvdrun", "_HVDRUN_COMPLETE").source()


def double_dashes(command: click.Command, ctx: click.Context, args: Sequence[str]) -> list[str]:
    """Writes our single-dash long forms with two dashes, up to the program's own command."""
    takes_value = {
        name: not (isinstance(p, click.Option) and p.is_flag)
        for p in command.get_params(ctx)
        for name in p.opts
    }
    done: list[str] = []
    words = list(args)
    while words:
        word = words.pop(0)
        if word == "--" or not word.startswith("-") or word == "-":
            return [*done, word, *words]
        name, sign, value = word.partition("=")
        name = SINGLE_DASH.get(name, name)
        done.append(name + sign + value)
        if takes_value.get(name) and not sign and words:
            done.append(words.pop(0))
    return done


@click.command(
    cls=HvdrunCommand,
    context_settings={
        "ignore_unknown_options": False,
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    },
    options_metavar="[OPTIONS]",
)
@click.option(
    "--num-proc",
    "num_proc",
    type=click.IntRange(1, 999_999),
    metavar="N",
    help="Number of processes. Default: all slots.",
)
@click.option(
    "-H",
    "--hosts",
    "hosts",
    metavar="H1:N,H2:N",
    help="Hosts and their slots: h1:4,user@h2:4,[fd00::1]:2; without a number one for each"
    " GPU, else core. Default: the hosts that Slurm, PBS, LSF or SGE gave, else this machine.",
)
@click.option(
    "--hostfile",
    "hostfile",
    shell_complete=files,
    metavar="FILE",
    help="Hosts from a file, one a line: 'h1 slots=4' or 'h1:4'.",
)
@click.option(
    "-p",
    "--ssh-port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="ssh's port on the hosts.",
)
@click.option(
    "-i",
    "--ssh-identity-file",
    shell_complete=files,
    metavar="FILE",
    help="ssh's private key.",
)
@click.option(
    "--mpi",
    "mpi",
    type=click.Choice(["auto", "openmpi", "mpich", "intel", "slurm"]),
    default="auto",
    help="Which MPI. Default: the one beside this Python, else in PATH. slurm: that one, started"
    " by srun.",
)
@click.option(
    "--mpi-args",
    "mpi_args",
    metavar="ARGS",
    default="",
    help="More arguments for mpirun, as one word.",
)
@click.option(
    "--binding-args",
    "binding_args",
    metavar="ARGS",
    default="",
    help="mpirun's arguments for binding, as one word, in place of what hvdrun does: each rank"
    " gets its share of the host's cores.",
)
@click.option(
    "-x",
    "export",
    multiple=True,
    metavar="VAR[=VALUE]",
    help="Set a variable for the ranks. Exported ones get there without it.",
)
@click.option(
    "--start-timeout",
    type=click.FloatRange(0, min_open=True),
    callback=no_nan,
    metavar="SECONDS",
    default=60.0,
    help="How long the ranks of all hosts may take to start. Default: 60.",
)
@click.option(
    "--output-dir",
    "--output-filename",
    "output_dir",
    metavar="DIR",
    help="Write what each rank says to DIR/rank.N/stdout and stderr, too.",
)
@click.option(
    "--prefix-output-with-timestamp",
    "timestamps",
    is_flag=True,
    help="Put the time in front of each line, also in the files of --output-dir.",
)
@click.option(
    "--network-interfaces",
    "--network-interface",
    "network_interfaces",
    metavar="NAMES|CIDRS",
    help="Networks for the ranks: eth1,10.0.0.0/16. Default: those on which all hosts meet.",
)
@click.option(
    "--check", is_flag=True, help="Look at the hosts, say what is found, and run nothing."
)
@click.option(
    "--disable-cache", is_flag=True, help="Ask hosts again that were all right within the hour."
)
@click.option(
    "--config-file",
    is_eager=True,
    callback=config_file.option_callback,
    metavar="FILE",
    help="Options from a YAML file; those of the command line win.",
)
@click.option("--dry-run", is_flag=True, help="Print what would run, and run nothing.")
@click.option("--verbose", is_flag=True, help="Say what is done, and all that mpirun says.")
@click.option("--check-build", is_flag=True, help="Print what this installation can do.")
@click.option(
    "--completion",
    type=click.Choice(["bash", "zsh"]),
    help='Print the completion for that shell: eval "$(hvdrun --completion bash)".',
)
@click.option("-v", "--version", is_flag=True, help="Print the version.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, shell_complete=files)
def cli(
    num_proc: int | None,
    hosts: str | None,
    hostfile: str | None,
    ssh_port: int | None,
    ssh_identity_file: str | None,
    mpi: str,
    mpi_args: str,
    binding_args: str,
    export: tuple[str, ...],
    start_timeout: float,
    output_dir: str | None,
    timestamps: bool,
    network_interfaces: str | None,
    check: bool,
    disable_cache: bool,
    dry_run: bool,
    verbose: bool,
    check_build: bool,
    completion: str | None,
    version: bool,
    command: tuple[str, ...],
    **runtime: object,
) -> int:
    """Run COMMAND on several processes and hosts, as one training job.

    A rank that fails ends the job; it is reported last, and its exit code is hvdrun's.
    """
    if version:
        from importlib.metadata import version as version_of

        click.echo(f"hvdrun {version_of('hvdlite')}")
        return 0
    if completion:
        click.echo(completion_script(cli, completion))
        return 0
    if check_build:
        command, num_proc, hosts, hostfile = CHECK_BUILD, 1, "localhost", None
    if not command and not check:
        raise UsageError("no COMMAND: say what to run, as in `hvdrun -np 2 python train.py`")
    if command and not command[0]:
        raise UsageError("COMMAND is an empty word: is a variable in the line not set?")
    if hosts and hostfile:
        raise UsageError("-H and --hostfile say the same thing: leave one of them out")
    request = Request(
        command=command,
        num_proc=num_proc,
        hosts=_hosts(hosts, hostfile),
        allocation=_allocation(is_needed=not (hosts or hostfile)),
        exports=parse_exports(export),
        ssh_port=ssh_port,
        ssh_identity_file=os.path.abspath(ssh_identity_file) if ssh_identity_file else None,
        mpi=mpi,
        mpi_args=_split("--mpi-args", mpi_args),
        binding_args=_split("--binding-args", binding_args),
        start_timeout_s=start_timeout,
        output_dir=output_dir,
        timestamps=timestamps,
        network_interfaces=parse_networks(network_interfaces),
        verbose=verbose,
        settings=settings(cli.params, runtime),
        notes=idle_notes(cli.params, runtime),
    )
    if check:
        return check_hosts(request)
    try:
        return launch(request, dry_run, disable_cache)
    except (NoMpi, MpiMismatch) as error:
        if not check_build:
            raise
        print(f"hvdrun: {error}\n", file=sys.stderr, flush=True)
        return subprocess.call(CHECK_BUILD)


cli.params += runtime_options()


def check_hosts(request: Request) -> int:
    """`--check`: everything anew, and every finding shown."""
    from hvdrun.preflight import preflight
    from hvdrun.preflight.findings_table import table

    found = facts.gather(request)
    seen = preflight.run(request, _mpi(request, found), found, fresh=True)
    click.echo(table(seen.findings, stream=1))
    return seen.exit_code


def _mpi(request: Request, found: commands.LocalFacts) -> flavour.Flavour:
    if request.mpi != "slurm":
        return flavour.detect(request.mpi, found.environ)
    mpi = flavour.detect("auto", found.environ)
    return slurm.with_srun(mpi, found.srun, request.allocation, found.environ)


def launch(request: Request, dry_run: bool, disable_cache: bool = False) -> int:
    found = facts.gather(request)
    request = commands.with_hosts_in_use(request, found)
    mpi = _mpi(request, found)
    flavour.check_mpi4py(mpi, request.command, found.environ)
    seen: Preflight | None = None
    if commands.is_remote(request, found):
        from hvdrun.preflight import preflight

        # What would run is shown without a word to any host.
        seen = preflight.run(request, mpi, found, disable_cache, only_remembered=dry_run)
        seen.check()
        found = seen.within(found)
    command = commands.build(request, mpi, found)
    if dry_run:
        click.echo(command.show(found))
        if seen and (unknown := seen.unknown(request)):
            click.echo(
                f"# not asked: {', '.join(unknown)}; their slots and networks are as hvdrun --check"
                " will find them"
            )
        return 0
    from hvdrun.job.attempts import supervise
    from hvdrun.output.screen import Screen

    screen = Screen(request, command.num_proc, found.environ)
    output = screen.output
    for note in (*command.notes, *(seen.notes(request.verbose) if seen else ())):
        output.say(f"hvdrun: {note}")
    if request.verbose:
        for line in (str(mpi), *command.explanations):
            output.say(f"hvdrun: {line}")
        output.say("\n".join(f"hvdrun: {line}" for line in command.show(found).splitlines()))
    failed = True
    try:
        code = supervise(command, found.cwd, screen, request.start_timeout_s, request.verbose)
        failed = code not in (0, CTRL_C)
    finally:
        if seen and failed:
            seen.cache.forget()  # the hosts may not be as they were
    return code


def _hosts(hosts: str | None, hostfile: str | None) -> tuple[Host, ...]:
    if hosts is not None:
        return parse_hosts(hosts)
    if hostfile is None:
        return ()
    try:
        return parse_hostfile(_read(hostfile), hostfile)
    except OSError as error:
        raise HostListError(f"--hostfile {hostfile}: {error.strerror}") from error


def _allocation(is_needed: bool) -> allocation.Allocation | None:
    """A scheduler's list that can't be read matters where it says the hosts."""
    try:
        return allocation.find(os.environ, _read)
    except HostListError:
        if is_needed:
            raise
        return None


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def parse_exports(words: Sequence[str]) -> dict[str, str | None]:
    exports: dict[str, str | None] = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"-x {word}: expected -x VAR or -x VAR=VALUE")
        exports[name] = value if sign else None
    return exports


def parse_networks(text: str | None) -> tuple[str, ...]:
    """Names of interfaces, and subnets or addresses."""
    words = tuple(word.strip() for word in (text or "").split(",") if word.strip())
    for word in words:
        if "/" in word:
            from ipaddress import ip_network

            try:
                ip_network(word, strict=False)
            except ValueError as error:
                raise UsageError(f"--network-interfaces {word}: {error}") from error
        elif not re.fullmatch(r"[A-Za-z0-9_.:@-]+", word):
            raise UsageError(f"--network-interfaces {word}: no interface has such a name")
    return words


def _split(option: str, text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"{option} {text!r}: {error}") from error


def main(args: Sequence[str] | None = None) -> int:
    """hvdrun's exit code. KeyboardInterrupt: Ctrl-C before a rank was started."""
    try:
        open_standard_files()
        result = cli.main(
            args=list(sys.argv[1:] if args is None else args),
            prog_name="hvdrun",
            standalone_mode=False,
        )
        return int(result or 0)
    except click.ClickException as error:
        print(f"hvdrun: {error.format_message().rstrip('.')}; see hvdrun --help", file=sys.stderr)
        return UsageError.code
    except LaunchError as error:
        print(f"hvdrun: {error}", file=sys.stderr)
        return error.code
    except click.Abort:
        raise KeyboardInterrupt from None
