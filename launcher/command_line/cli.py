"""hvdrun's command line."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from hvdrun.command_line import config_file, nodes
from hvdrun.command_line.hvdrun_option import write_epilog, write_options
from hvdrun.command_line.own_options import OPTIONS, files, request_fields
from hvdrun.command_line.runtime_options import idle_notes, runtime_options, settings
from hvdrun.command_line.spellings import in_our_spelling
from hvdrun.errors import HostListError, LaunchError, MpiMismatch, NoMpi, UsageError
from hvdrun.job.course import Supervision
from hvdrun.machine.environment import RENDEZVOUS_SECRET
from hvdrun.output import metrics_file
from hvdrun.output.screen import Screen
from hvdrun.output.terminal import open_standard_files
from hvdrun.plan import facts, flavour, programs, schedulers
from hvdrun.plan.checks import check_counted_knobs, check_faults, check_servers
from hvdrun.plan.command import build
from hvdrun.plan.facts import LocalFacts, is_local
from hvdrun.plan.hosts import Host, few, parse_hostfile
from hvdrun.plan.job_hosts import hosts_of, is_remote, is_started_everywhere, with_hosts_in_use
from hvdrun.plan.request import Allocation, Request
from hvdrun.reports import lacking
from hvdrun.reports.report_file import ReportFile
from hvdrun.running.askers import FIGURES, METRICS, STACKS, NoAnswer, ask
from hvdrun.running.sources import NodeSignals
from hvdrun.running.supervise import supervise

CTRL_C = 130  # the exit code of a process that SIGINT ended


def _own_interfaces(request: Request, facts: LocalFacts) -> None:
    if request.network_interfaces:
        from hvdrun.preflight.interface_options import check_own

        check_own(request, facts)


Check = Callable[[Request, LocalFacts], str | None]
# Of what the user asks for, in this order: before any host is asked, and again once the number of
# ranks is known. Each raises a LaunchError, or returns a line to show at the start, if any.
CHECKS: tuple[Check, ...] = (
    programs.check_stdin,
    check_faults,
    check_servers,
    check_counted_knobs,
    _own_interfaces,
)

# Runs as a job of one rank, so that it shows MPI at work.
CHECK_BUILD = (sys.executable, "-m", "hvdlite.check_build")


class HvdrunCommand(click.Command):
    """Options in groups; the first word that is no option begins the program's own command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            args = in_our_spelling(self.get_params(ctx), args)
        except click.UsageError:
            if not ctx.resilient_parsing:  # as it is while the shell completes a word
                raise
        rest = super().parse_args(ctx, args)
        config_file.prefer_command_line(ctx)
        return rest

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Completes file names in the program's own command, which hvdrun does not know."""
        if not ctx.params.get("command"):
            return super().shell_complete(ctx, incomplete)
        (words,) = (p for p in self.params if isinstance(p, click.Argument))
        return words.shell_complete(ctx, incomplete)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_options(ctx, self.get_params(ctx), formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_epilog(formatter)


def completion_script(command: click.Command, shell: str) -> str:
    """For the shell to source."""
    kind = get_completion_class(shell)
    assert kind is not None
    return kind(command, {}, "hvdrun", "_HVDRUN_COMPLETE").source()


@click.command(
    cls=HvdrunCommand,
    params=[
        *OPTIONS,
        click.Argument(["command"], nargs=-1, type=click.UNPROCESSED, shell_complete=files),
        *runtime_options(),
    ],
    context_settings={
        "ignore_unknown_options": False,
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    },
    options_metavar="[OPTIONS]",
)
def cli(
    command: tuple[str, ...],
    check_build: bool,
    completion: str | None,
    stacks: int | None,
    metrics: int | None,
    json: bool,
    version: bool,
    **others: Any,
) -> int:
    """Run COMMAND on several processes and hosts, as one training job.

    The first rank that fails ends the job; hvdrun reports it last and exits with its exit code.
    """
    if version:
        click.echo(f"hvdrun {nodes.version()}")
        return 0
    if completion:
        click.echo(completion_script(cli, completion))
        return 0
    if json and metrics is None:
        raise UsageError("--json belongs to --metrics PID")
    if stacks is not None or metrics is not None:
        return _ask(stacks, metrics, json, command)
    report = click.get_current_context().find_object(ReportFile) or ReportFile()
    if others["report_file"] and not (check_build or others["dry_run"]):
        report.command = list(command)
        with contextlib.suppress(OSError):  # the folder is gone: `facts.gather` says so
            report.path = os.path.abspath(others["report_file"])
    if check_build:
        command = CHECK_BUILD
        others |= {"num_proc": 1, "hosts": "localhost", "hostfile": None, "check": False}
        others |= dict.fromkeys(nodes.OPTIONS)
    if not command and not others["check"]:
        raise UsageError("no COMMAND: say what to run, as in `hvdrun -np 2 python train.py`")
    if command and not command[0]:
        raise UsageError("COMMAND is an empty word: is a variable in the line not set?")
    hosts, hostfile = others["hosts"], others["hostfile"]
    if hosts and hostfile:
        raise UsageError("-H and --hostfile both name the hosts: leave one of them out")
    nodes.check_options(others)
    values = request_fields(others)
    if hosts is None and hostfile is not None:
        values["hosts"] = _hosts_in_file(hostfile)
    # --rendezvous comes before what a scheduler says, also for a job of this host alone.
    allocation = None if others["rendezvous"] else _allocation(is_needed=not (hosts or hostfile))
    request = Request(
        command=command,
        allocation=allocation,
        settings=_settings(others),
        notes=idle_notes(cli.params, others),
        **values,
    )
    if check_build:
        return _check_build(request)
    if others["rendezvous_secret_file"]:
        from hvdrun.rendezvous import secret

        secret.take(
            {}, others["rendezvous_secret_file"]
        )  # a wrong file is an error on one host too
    place = nodes.place_of(request, others, os.environ)
    if place is not None and place.node_rank:
        report.path = ""  # node 0 writes it, maybe the same file
    report.begin()
    programs.check_nesting(request.command, os.environ, place is None)
    if place is None:
        os.environ.pop(RENDEZVOUS_SECRET, None)  # nothing that is started here inherits it
        return launch(request, report=report)
    if request.dry_run:
        return launch(nodes.as_if_all_were_here(request, place))
    job = partial(launch, report=report)
    return nodes.run(request, place, others["rendezvous_secret_file"], job)


def _settings(given: dict[str, Any]) -> dict[str, str]:
    found = settings(cli.params, given, os.environ)
    # The ranks measure themselves if there is somebody to tell.
    if given["metrics_file"] or given["monitor"]:
        found = {"HVDLITE_SUMMARY": "1", **found}
    return found | ({"HVDLITE_MONITORED": "1"} if given["monitor"] else {})


def _ask(stacks: int | None, metrics: int | None, json: bool, command: tuple[str, ...]) -> int:
    """One question to a running job, and nothing else."""
    if stacks is not None and metrics is not None:
        raise UsageError("--stacks and --metrics are two questions: ask one at a time")
    option, question = ("--metrics", METRICS) if stacks is None else ("--stacks", STACKS)
    if command:
        raise UsageError(
            f"{option} PID asks a running job and starts none: leave out `{' '.join(command)}`,"
            f" or leave out {option} to start a job"
        )
    pid = metrics if stacks is None else stacks
    assert pid is not None
    try:
        click.echo(ask(pid, FIGURES if json else question))
    except NoAnswer as error:
        raise UsageError(f"{option} {pid}: {error}") from error
    return 0


def _check_build(request: Request) -> int:
    try:
        return launch(request)
    except (NoMpi, MpiMismatch) as error:
        print(f"hvdrun: {error}\n", file=sys.stderr, flush=True)
        return subprocess.call(CHECK_BUILD)


def _check_hosts(request: Request, report: ReportFile) -> int:
    """`--check`: asks every host again, and shows every finding."""
    from hvdrun.preflight import preflight
    from hvdrun.preflight.findings_table import table

    found = facts.gather(request)
    check_counted_knobs(request, found)
    _own_interfaces(request, found)
    mpi = _mpi(request, found)
    seen = preflight.run(request, mpi, found, fresh=True, is_check=True)
    click.echo(table(seen.findings, stream=1))
    if seen.failures:
        report.fail(seen.error(f"not every host is ready:\n{table(seen.failures)}"))
    return seen.exit_code


def _mpi(request: Request, found: LocalFacts) -> flavour.Flavour:
    scheduler = schedulers.BY_OPTION.get(request.mpi)
    if scheduler is None or scheduler.start_with is None:
        return flavour.detect(request.mpi, found.environ)
    mpi = flavour.detect("auto", found.environ)
    return scheduler.start_with(mpi, found.starter, request.allocation, found.environ)


def _findings(request: Request, found: LocalFacts) -> dict[Check, str | None]:
    return {check: check(request, found) for check in CHECKS}


def launch(
    request: Request,
    on_line: Callable[[str], None] = lambda _: None,
    node_signals: NodeSignals | None = None,
    report: ReportFile | None = None,
) -> int:
    """on_line: gets the lines that hvdrun itself says from then on; node_signals: gives the signals
    of other nodes, if each host runs an hvdrun."""
    report = report or ReportFile()
    files_before = lacking.raise_files(1, len(hosts_of(request)))
    if request.check:
        return _check_hosts(request, report)
    found = facts.gather(request)
    _findings(request, found)
    requeue = schedulers.find_requeue(os.environ) if request.requeue else None
    request = with_hosts_in_use(request, found)
    mpi = _mpi(request, found)
    flavour.check_mpi4py(mpi, request.command, found.environ)
    seen = None
    if is_remote(request, found):
        from hvdrun.preflight import preflight  # a third of hvdrun, for other hosts only

        # Hosts that a platform starts may be others under the same names each time.
        fresh = request.disable_cache or is_started_everywhere(request)
        # --dry-run contacts no host.
        seen = preflight.run(request, mpi, found, fresh, only_remembered=request.dry_run)
        seen.check()
        found = seen.within(found)
    command = build(request, mpi, found)
    request = replace(request, num_proc=command.num_proc)
    report.job = command
    if report.path and report.path == request.metrics_file:
        raise UsageError(
            f"--report-file and --metrics-file are both {report.path}; give each its own"
        )
    findings = _findings(request, found)
    if request.dry_run:
        click.echo(command.show(found))
        if seen and (unknown := seen.unknown(request)):
            click.echo(
                f"# not asked: {few(unknown)}; `hvdrun --check` finds their slots and networks"
            )
        if warning := findings[check_counted_knobs]:
            click.echo(f"# {warning}")
        return 0
    path = request.variable("PATH", found.environ) or ""
    if any(is_local(share.host, found) for share in command.shares):
        programs.check_script(request.command, found.cwd, path)
    command = lacking.within_limits(command, mpi, found, files_before)
    if request.metrics_file:
        metrics_file.check(request.metrics_file)
    screen = Screen(request, command.num_proc, found.environ)
    output = screen.output
    output.on_line = on_line
    said = [*findings.values(), *command.notes, *(seen.notes(request.verbose) if seen else ())]
    if request.verbose:
        which = programs.which(request.command, path, os.environ.get("PATH", ""))
        shown = command.show(found).replace("\n", "\nhvdrun: ")
        said += [str(mpi), which, *command.explanations, shown]
    for line in filter(None, said):
        output.say(f"hvdrun: {line}")
    code = None
    try:
        supervision = Supervision(request, found.cwd, requeue, report)
        kept = seen.connections if seen else None
        code = supervise(command, screen, supervision, node_signals, kept)
        return code
    finally:
        if seen and code not in (0, CTRL_C):
            seen.cache.forget()  # the hosts may have changed


def _hosts_in_file(path: str) -> tuple[Host, ...]:
    try:
        return parse_hostfile(_read(path), path)
    except OSError as error:
        raise HostListError(f"--hostfile {path}: {error.strerror}") from error


def _allocation(is_needed: bool) -> Allocation | None:
    """A scheduler's list that can't be read is an error only if the job needs it."""
    try:
        return schedulers.find(os.environ, _read)
    except HostListError:
        if is_needed:
            raise
        return None


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def main(args: Sequence[str] | None = None) -> int:
    """hvdrun's exit code. KeyboardInterrupt: Ctrl-C before a rank was started."""
    report = ReportFile()
    error: LaunchError
    try:
        open_standard_files()
        result = cli.main(
            args=list(sys.argv[1:] if args is None else args),
            prog_name="hvdrun",
            standalone_mode=False,
            obj=report,
        )
        return report.end(int(result or 0))
    except click.ClickException as mistake:
        error = UsageError(f"{mistake.format_message().rstrip('.')}; see hvdrun --help")
    except LaunchError as failure:
        error = failure
    except click.Abort as abort:
        report.interrupted(abort.__cause__)
        raise KeyboardInterrupt from None
    except Exception as exception:
        lack = lacking.of(exception)
        if lack is None:
            report.fail(exception)
            report.end(1)
            raise
        error = lack
    report.fail(error)
    code = report.end(error.code)
    with contextlib.suppress(OSError):  # its reader is gone, or the disk is full
        print(f"hvdrun: {error}", file=sys.stderr)
    return code
