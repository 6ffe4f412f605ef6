"""The report at the end of a failed job. Pure."""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from hvdrun.errors import (
    CommandNotFound,
    HostLost,
    HostSetupError,
    LaunchError,
    MpirunFailed,
    SshFailed,
    StartTimeout,
)
from hvdrun.output.folding import spans
from hvdrun.plan.schedulers import trouble
from hvdrun.plan.shared_memory import REMEDY, size
from hvdrun.reports.quiet_hosts import names
from hvdrun.ssh_errors import LOGIN, OTHER, last_words

LINES = 30
MOST_MISPLACED = 4
# Patterns are compiled when a job fails, not at each start of hvdrun.
# The first line of Open MPI's message that it ends a rank; the next one names the communicator.
_REPORTER = r"\*\*\* reported by process \[\d+,(\d+)\]"
# By the connection that closed, or by the exit code of the ssh to it.
_LOST_DAEMON = (
    r"(?s)lost communication with a remote daemon.{1,300}?Remote daemon *: +\[\S+\] on node (\S+)"
)
_FAILED_DAEMON = r"(?s)daemon failed to report back .{1,600}?Remote host *: +(\S+)"
# What a rank writes if it fails because another one has left: hvdlite, MPI, or a closed connection.
_MISSED = (
    r"HorovodInternalError|MPI_|MPI\.Exception|Fatal error in|[Cc]onnection|[Bb]roken ?[Pp]ipe"
)
# The core's words (_core/matching/leaving.c).
_DIED = r"HorovodInternalError: rank (\d+) on \S+ has died$"
# What MPICH's ranks print on an abort. MPICH kills them all at once, so their exit codes are lost.
_ABORT = rb"(?m)^Abort\((\d+)\) on node \d+"


class Failure(NamedTuple):
    """The rank that failed first."""

    rank: int
    host: str
    ended: str  # 'code 3', 'signal 9', 'oom 9' or 'shm 7 64/64', as the keeper reports it
    after_s: float
    # MPI had already ended its shim: another failure may be the cause.
    late: bool = False
    at: float | None = None  # in seconds since 1970

    @property
    def exit_code(self) -> int:
        kind, number, *_ = self.ended.split()
        return int(number) if kind == "code" else 128 + int(number)

    def __str__(self) -> str:
        kind, number, *more = self.ended.split()
        if kind == "code":
            how = f"ended with exit code {number}"
        else:
            how = f"was ended by {signal_name(int(number))}"
        if kind == "oom":
            how += ", sent by the kernel's out-of-memory killer"
        elif kind == "shm":
            used, there = (size(int(count)) for count in more[0].split("/"))
            how += f" beside a full /dev/shm ({used} of {there} used)"
        elif self.ended == "signal 9":
            how += " (kill -9, or a batch system)"
        at = "" if self.at is None else time.strftime(" (at %H:%M:%S)", time.localtime(self.at))
        return f"rank {self.rank} on {self.host} {how} after {duration(self.after_s)}{at}"


def duration(seconds: float) -> str:
    """'4.2 s', '3 min 05 s', '26 h 03 min'."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(int(seconds), 60)
    hours, rest_min = divmod(minutes, 60)
    return f"{hours} h {rest_min:02} min" if hours else f"{minutes} min {rest_s:02} s"


def signal_name(number: int) -> str:
    try:
        return f"{signal.Signals(number).name} ({signal.strsignal(number)})"
    except ValueError:
        return f"signal {number}"


def last_lines(stderr: bytes) -> list[str]:
    """The end of what a rank wrote to stderr, from its last traceback on if there is one."""
    text = stderr.decode(errors="replace").replace("\r\n", "\n")
    lines = [line.rpartition("\r")[2].rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    recent = lines[-LINES:]
    starts = [i for i, line in enumerate(recent) if line.startswith("Traceback (most recent")]
    if starts:
        # With chained exceptions, this is the first of the chain.
        return recent[starts[0] :]
    return recent[-10:]


def first_failure(failures: Iterable[Failure], mpirun_said: Iterable[str]) -> Failure | None:
    """The failure that caused the others, as far as that can be known. It does not depend on the
    order in which the hosts report."""
    lost = lost_a_peer(mpirun_said)
    return min(
        failures,
        key=lambda failure: (failure.rank in lost, failure.late, failure.after_s, failure.rank),
        default=None,
    )


def lost_a_peer(mpirun_said: Iterable[str]) -> set[int]:
    """The ranks that Open MPI ended because another rank's connection closed: such an error belongs
    to no communicator, and so to no MPI call of the program."""
    ranks: set[int] = set()
    reporter = None
    for line in mpirun_said:
        if match := re.search(_REPORTER, line):
            reporter = int(match[1])
        elif reporter is not None and "*** on a NULL communicator" in line:
            ranks.add(reporter)
    return ranks


def lost_daemon(mpirun_said: Iterable[str]) -> str | None:
    """The host whose daemon Open MPI's mpirun has lost."""
    said = "\n".join(mpirun_said)
    found = [re.search(_LOST_DAEMON, said), re.search(_FAILED_DAEMON, said)]
    first = min(filter(None, found), key=lambda match: match.start(), default=None)
    return first[1] if first else None


def host_without_words(
    ranks_of: Mapping[str, Iterable[int]], started: Container[int], ended: Container[int]
) -> str | None:
    """A host that started ranks and has not reported how any of them ended: it was lost with them.
    Ranks of other hosts may have failed because of that, and may have been reported earlier."""
    for host, ranks in ranks_of.items():
        there = [rank for rank in ranks if rank in started]
        if there and not any(rank in ended for rank in there):
            return host
    return None


def aborted(stderr: Mapping[int, bytes]) -> tuple[int, str] | None:
    """The rank that called MPI_Abort and how it would have ended, read from what it wrote."""
    for rank, text in sorted(stderr.items()):
        match = re.search(_ABORT, text)
        if match:
            return rank, f"code {int(match[1]) & 255 or 1}"
    return None


# Open MPI's sentence about a rank that left without MPI_Finalize; its line break may be anywhere.
_IMPROPER = r"process rank (\d+) with PID .*? exiting improperly"


def left_improperly(mpirun_said: Iterable[str]) -> int | None:
    """The rank that Open MPI says has ended without MPI_Finalize."""
    said = " ".join(mpirun_said)
    match = re.search(_IMPROPER, said) if said else None
    return int(match[1]) if match else None


def left_early(rank: int, host: str, after_s: float) -> MpirunFailed:
    """A rank ended with 0 too early, and the others were ended because of that."""
    return MpirunFailed(
        f"rank {rank} on {host} ended with exit code 0 after {duration(after_s)}, in mid-job: it"
        " left without MPI_Finalize, and the ranks that were still running were ended; end a rank"
        " with hvd.shutdown() or MPI_Finalize, not with os._exit(0)"
    )


def ended_after_another(failure: Failure, left: int, has_words: bool) -> str:
    """Stands above `left_early`. left: the rank that it is about. has_words: the other rank has
    written why it ended."""
    if has_words:
        return f"hvdrun: rank {left} had left when {failure}, as it says above"
    return (
        f"hvdrun: rank {left} had left when {failure}, without a word; MPI may end a rank so that"
        " misses another one"
    )


def died_for(said: Iterable[str]) -> int | None:
    """The rank of which a rank's last lines say that it is gone."""
    found = [match for line in said if (match := re.search(_DIED, line))]
    return int(found[-1][1]) if found else None


_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)


def may_be_of_mpi(failure: Failure) -> bool:
    """Whether an MPI may end a rank so, or crash in it, because it misses another one."""
    kind, number, *_ = failure.ended.split()
    return kind == "code" or (kind == "signal" and int(number) in _CRASHES)


def had_left(rank: int, host: str, after_s: float) -> str:
    return (
        f"hvdrun: rank {rank} on {host} had ended with exit code 0 after {duration(after_s)}: if"
        " the others still needed it, this is the cause"
    )


def missed_a_peer(said: Iterable[str]) -> bool:
    """Whether a rank may have failed because another one was gone, by its last lines."""
    return any(re.search(_MISSED, line) for line in said)


def run_on(rank: int, host: str, left: int, since_s: float) -> str:
    others = "1 other rank still runs" if left == 1 else f"{left} other ranks still run"
    return (
        f"hvdrun: rank {rank} on {host} ended with exit code 0 {duration(since_s)} ago, and"
        f" {others}; if they wait for it (it left without MPI_Finalize), Ctrl-C ends them"
    )


def interrupted(
    number: int, before: int | None, running: int, grace_s: float, of_nodes: bool = False
) -> str:
    """The line that is shown at once after Ctrl-C or a signal like it. `before`: the first one;
    `running`: how many ranks run; `of_nodes`: each host runs an hvdrun."""
    name = _typed(number)
    if before is not None:
        order = "again" if number == before else f"after {_typed(before)}"
        return f"hvdrun: {name} {order}: killing everything now"
    if not running:
        return f"hvdrun: {name}: no rank is running; the job ends"
    if not grace_s:
        return f"hvdrun: {name}: killing everything now"
    ranks, them = ("the rank has", "it") if running == 1 else (f"the {running} ranks have", "them")
    second = f"a second {name}{' on the same node' if of_nodes else ''}"
    return f"hvdrun: {name}: {ranks} {grace_s:.3g} s to end; {second} kills {them} at once"


def _typed(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def unstoppable() -> str:
    """The line that answers Ctrl-Z."""
    return (
        "hvdrun: Ctrl-Z: hvdrun does not stop, as other hosts would take it for dead and end their"
        " ranks; Ctrl-C ends the job; to have the terminal free, start hvdrun with & at its end, or"
        " in tmux"
    )


def not_started(hosts: Sequence[tuple[str, int, str]], after_s: float) -> StartTimeout:
    """`hosts`: name, number of ranks that have not started there, and what is known about it."""
    lines = [
        f"    {host}: {lacking} {'rank' if lacking == 1 else 'ranks'} not started"
        + (f": {state}" if state else "")
        for host, lacking, state in hosts
    ]
    return StartTimeout(
        f"the job has not started within {after_s:g} s (--start-timeout):\n"
        + "\n".join(lines)
        + "\ncheck these hosts and the network between them, or give a longer --start-timeout"
    )


def misplaced(wrong: Mapping[tuple[str, str], Sequence[int]], starter: str) -> MpirunFailed:
    """`wrong`: the ranks by their planned and their actual host."""
    found = [
        f"{'rank' if len(ranks) == 1 else 'ranks'} {spans(ranks)} on {actual} instead of {planned}"
        for (planned, actual), ranks in list(wrong.items())[:MOST_MISPLACED]
    ]
    found += [f"and more on {len(wrong) - len(found)} other hosts"] * (len(wrong) > len(found))
    return MpirunFailed(
        f"{starter} has started {', '.join(found)}; it has taken one host for another, so see that"
        " each host's own name (`hostname`) is no other host's and means this host everywhere, or"
        " list the hosts by their addresses (-H 10.0.0.1:2,10.0.0.2:2)"
    )


def of_full_shared_memory(failure: Failure) -> str:
    """What to do about it, or an empty text."""
    if not failure.ended.startswith("shm "):
        return ""
    return (
        "hvdrun: a process that needs more memory from a full /dev/shm ends like that: see what"
        f" fills it on {failure.host} (`ls -l /dev/shm`) and remove old files; {REMEDY}"
    )


def rank_failed(
    failure: Failure,
    said: Sequence[str],
    same: Sequence[int],
    num_proc: int,
    repeat: bool = True,
    waited_at: str = "",
) -> str:
    """`said`: the rank's last lines; `same`: all ranks whose last lines are the same; `repeat`:
    whether to show them, as they are not on the screen right above; `waited_at`: the line of the
    script from which the rank has waited for hvdlite last, if that is known."""
    others = {1: "", 2: "; the other rank was ended"}.get(
        num_proc, f"; the other {num_proc - 1} ranks were ended"
    )
    lines = [f"hvdrun: {failure}{others}"]
    if said and num_proc > 1:  # a single rank's last lines have just been shown
        many = f" (the same on ranks {spans(same)})" if len(same) > 1 else ""
        if repeat:
            lines.append(f"hvdrun: its last lines on stderr{many}:")
            lines += [f"    {line}" for line in said]
        else:
            lines.append(f"hvdrun: its last lines on stderr{many} are just above")
    # A traceback knows better.
    if waited_at and not any(line.startswith("Traceback ") for line in said):
        lines.append(f"hvdrun: it last waited for hvdlite in {waited_at}")
    if cause := of_full_shared_memory(failure):
        lines.append(cause)
    return "\n".join(lines)


def host_silent(
    host: str, silent_s: float, limit_s: float, others: Sequence[str], ssh_said: bytes
) -> HostLost:
    """`others`: more hosts that are silent."""
    too = f" (nor has {names(others)})" if others else ""
    return host_lost(
        host,
        f"it has given no sign of life for {silent_s:.0f} s{too}, and the limit is"
        f" {limit_s:g} s (--host-timeout)",
        ssh_said,
    )


def paused(pause_s: float) -> str:
    return (
        f"hvdrun: hvdrun itself did not run for {pause_s:.0f} s (stopped, suspended or held up);"
        " no host is blamed for that time"
    )


def gave_up(host: str, silent_s: float, pause_s: float) -> HostLost:
    """The host has ended its ranks. `pause_s`: for how long hvdrun itself did not run before."""
    if pause_s:
        why = (
            f"hvdrun itself did not run for {pause_s:.0f} s: it was stopped, or its machine was"
            " suspended; start it where that does not happen, or give a longer --host-timeout"
        )
    else:
        why = "check the network between this machine and it, then start the job again"
    return HostLost(
        f"{host} has ended its ranks, as it heard nothing from hvdrun for {silent_s:.0f} s"
        f" (--host-timeout); {why}"
    )


def host_lost(host: str, how: str, ssh_said: bytes = b"") -> HostLost:
    said = ssh_said.decode(errors="replace").strip().splitlines()
    detail = f" ({said[-1]})" if said else ""
    return HostLost(
        f"{host} is lost: {how}{detail}; if it still runs, its ranks end by themselves; check the"
        " host and its network, then start the job again"
    )


def not_understood(who: str, what: str) -> HostLost:
    return HostLost(
        f"{who} sent {what}, which hvdrun can't read, so hvdrun has hung up and ends the job; that"
        " process is broken, or its host runs another version of hvdlite"
    )


def missing_program(program: str, rank: int, host: str, number: int) -> LaunchError:
    if number in (errno.ENOENT, errno.ENOTDIR):
        return CommandNotFound(
            f"{program!r} was not found on {host} (rank {rank}): it is neither a path there nor in"
            " PATH; correct the name, or install the program on every host"
        )
    why = os.strerror(number)
    return CommandNotFound(
        f"{program!r} can't be run on {host} (rank {rank}): {why}; a script needs"
        " `python` before its name, or a #! line and chmod +x"
    )


def unreachable(host: str, errors: bytes, python: str, printed: bytes = b"") -> LaunchError:
    """The connection ended before the host agent's first message. ssh's stderr tells why, or what
    the login shell has printed."""
    text = errors.decode(errors="replace")
    words = last_words(text) or last_words(printed.decode(errors="replace"))
    said = words or "nothing was printed"
    why = trouble(text)
    if why is not OTHER or text.startswith("ssh:"):
        remedy = why.remedy.format(host=host, login=host)
        return SshFailed(f"{host} can't be reached by {why.way}: {why.cause} ({said}); {remedy}")
    if python in text or re.search("(?i)not found|no such file|exit code 12[67]", text):
        return HostSetupError(
            f"ssh reached {host}, but hvdrun's agent could not start there: {said}; every host"
            f" needs the same installation at the same path ({python})"
        )
    return HostSetupError(
        f"ssh to {host} ended before hvdrun's agent started there: {said};"
        f" {LOGIN.format(login=host)}"
    )


def held_by_another(host: str, said: str) -> HostSetupError:
    return HostSetupError(f"{host} can't run ranks: {said}")


def daemon_failed(host: str, status: int, said: bytes) -> LaunchError:
    """MPI's daemon ended before it started a rank; mpirun may wait for it for ever."""
    lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
    words = "; ".join(lines[-3:]) or "it printed nothing"
    missing = "not found|No such file|cannot open shared object|Permission denied"
    if status in (126, 127) or re.search(missing, words):
        remedy = "every host needs the same MPI at the same path"
    else:
        remedy = (
            "`hvdrun --check` tests what it needs: a folder for temporary files with room, and TCP"
            " to the host of hvdrun"
        )
    return HostSetupError(
        f"ssh reached {host}, but MPI's daemon ended there with exit code {status}: {words};"
        f" {remedy}"
    )
