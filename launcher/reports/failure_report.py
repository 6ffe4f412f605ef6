"""How a job has failed, as one report, and the words for it: each text that hvdrun says about a
failure, on the screen and in `--report-file`, stands here. `job.verdict` decides. Pure."""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from hvdrun.errors import (
    CommandNotFound,
    HostLost,
    HostSetupError,
    LaunchError,
    LeftEarly,
    MpirunFailed,
    SshFailed,
    StartTimeout,
)
from hvdrun.output.folding import spans
from hvdrun.plan.schedulers import trouble
from hvdrun.plan.shared_memory import REMEDY, size
from hvdrun.ssh_errors import LOGIN, OTHER, last_words

NAMED = 3  # hosts in a line; of more, only their number is shown
MOST_MISPLACED = 4

# ---- how a rank ended, as its keeper reports it, and what to do


class _Words(NamedTuple):
    cause: Any  # a word, or hvdrun's error
    what: str
    remedy: str = ""


_ENDS = {
    "code": _Words("rank-failed", "ended with exit code {number}"),
    "signal": _Words("rank-killed", "was ended by {signal}"),
    "oom": _Words(
        "out-of-memory",
        "was ended by {signal}, sent by the kernel's out-of-memory killer",
        "give the ranks on {host} more memory, or start fewer of them there",
    ),
    "shm": _Words(
        "shared-memory-full",
        "was ended by {signal} beside a full /dev/shm ({used} of {there} used)",
        f"see what fills /dev/shm on {{host}} (`ls -l /dev/shm`) and remove old files; {REMEDY}",
    ),
}
# ---- why hvdrun ends a job itself: its error, what has happened, and what to do


_IN_INIT = (
    "every rank must call hvd.init(), before any `sys.exit()`, `return` or `if` of some ranks only"
)
_CLOSES = "close only what the program has opened itself (not os.closerange, nor as daemons do)"
_RESTART = "check the host and its network, then start the job again"
_CAUSES = {
    "left early": _Words(
        LeftEarly,
        "rank {rank} on {host} ended with exit code 0 after {after}, in mid-job: it left without"
        " MPI_Finalize, so the other ranks were ended",
        "end a rank with hvd.shutdown() or MPI_Finalize, not with os._exit(0)",
    ),
    "left before init": _Words(
        LeftEarly,
        "rank {rank} on {host} ended with exit code 0 after {after} and had not called {where},"
        " where {waits} waited for it",
        _IN_INIT,
    ),
    "not in init": _Words(
        StartTimeout,
        "{missing} {have} not called {where}, where {wait} for {limit_s:g} s ({variable})",
        f"{_IN_INIT}; or give a longer time if a rank prepares something before",
    ),
    "init does not end": _Words(
        StartTimeout,
        "all ranks have called {where}, but it has not ended on {missing} after {limit_s:g} s"
        " ({variable})",
        "see that the hosts reach each other (hvdrun --check)",
    ),
    "not started": _Words(
        StartTimeout,
        "the job has not started within {limit_s:g} s (--start-timeout):\n{hosts}",
        "check these hosts and the network between them, or give a longer --start-timeout",
    ),
    "misplaced": _Words(
        MpirunFailed,
        "{starter} has started {ranks}; it has taken one host for another",
        "each host's name (`hostname`) must be its own, and mean it everywhere; or list hosts by"
        " their addresses (-H 10.0.0.1:2,10.0.0.2:2)",
    ),
    "closed files": _Words(
        MpirunFailed,
        "rank {rank} on {host} closed its file descriptors after {after}, MPI's connections to"
        " other ranks among them, and that ended the job ({failure})",
        _CLOSES,
    ),
    "no start": _Words(
        MpirunFailed,
        "{starter} could not start the job ({ended}): {words}",
        "`hvdrun --dry-run` shows the command",
    ),
    "mpirun ended": _Words(
        MpirunFailed,
        "{starter} ended the job ({ended}) while rank {rank} on {host} was running: {words}",
    ),
    "host lost": _Words(
        HostLost,
        "{host} is lost: {how}{said}",
        f"if it still runs, its ranks end by themselves; {_RESTART}",
    ),
    "host gave up": _Words(
        HostLost,
        "{host} has ended its ranks, as it heard nothing from hvdrun for {silent_s:.0f} s"
        " (--host-timeout)",
        "check the network between this machine and {host}, then start the job again",
    ),
    "host gave up, paused": _Words(
        HostLost,
        "{host} has ended its ranks, as it heard nothing from hvdrun for {silent_s:.0f} s"
        " (--host-timeout); hvdrun itself did not run for {pause_s:.0f} s: it was stopped, or its"
        " machine was suspended",
        "start it where that does not happen, or give a longer --host-timeout",
    ),
    "not understood": _Words(
        HostLost,
        "{who} sent {what}, which hvdrun can't read, so it ends the job",
        "that process is broken, or its host runs another version of hvdlite",
    ),
    "no program": _Words(
        CommandNotFound,
        "{program!r} was not found on {host} (rank {rank}): it is neither a path there nor in PATH",
        "correct the name, or install the program on every host",
    ),
    "no right to run": _Words(
        CommandNotFound,
        "{program!r} can't be run on {host} (rank {rank}): {why}",
        "a script needs `python` before its name, or a #! line and chmod +x",
    ),
    "not reached": _Words(SshFailed, "{host} can't be reached by {way}: {why} ({said})", "{do}"),
    "no agent": _Words(
        HostSetupError,
        "ssh reached {host}, but hvdrun's agent could not start there: {said}",
        "every host needs the same installation at the same path ({python})",
    ),
    "no login": _Words(
        HostSetupError,
        "ssh to {host} ended before hvdrun's agent started there: {said}",
        LOGIN.replace("{login}", "{host}"),
    ),
    "refused": _Words(HostSetupError, "{host} can't run ranks: {said}"),
    "daemon failed": _Words(
        HostSetupError,
        "ssh reached {host}, but MPI's daemon ended there with exit code {status}: {words}",
        "{do}",
    ),
}
# ---- lines beside these: what may be the cause, and what goes on

_NOTES = {
    "had left": "rank {rank} on {host} had ended with exit code 0 after {after}: if the others"
    " still needed it, this is the cause",
    "had left when": "rank {rank} had left when {failure}, as it says above",
    "had left when, without words": "rank {rank} had left when {failure}, without a word:"
    " MPI may end a rank so that misses another",
    "had closed files": "it had closed its file descriptors {before} before, MPI's among them;"
    f" {_CLOSES}",
    "lost a running rank": "MPI ended rank {rank} because its connection to {which} was closed, and"
    " no other rank had ended: if one of them closes file descriptors, this is the cause;"
    f" {_CLOSES}",
    "closed files": "rank {rank} on {host} has closed its file descriptors, MPI's among them, and"
    f" runs on: the others may wait for it for ever; {_CLOSES}",
    "ranks run on": "rank {rank} on {host} ended with exit code 0 {since} ago, and {others}; if"
    " they wait for it (it left without MPI_Finalize), Ctrl-C ends them",
    "paused": "hvdrun itself did not run for {pause_s:.0f} s (stopped, suspended or held up); no"
    " host is blamed for that time",
    "does not stop": "Ctrl-Z: hvdrun does not stop, as other hosts would take it for dead and end"
    " their ranks; Ctrl-C ends the job; to free the terminal, start hvdrun with & or in tmux",
    "preempted": "the job was preempted: hvd.preempted() has told the ranks, and all have ended in"
    " order; exit code {code}, as the work may not be done",
    "not requeued": "the job is not requeued, as it has failed",
    "rank not requeued": "the job is not requeued: rank {rank} on {host} {ended} after"
    " hvd.preempted() had told it to leave, and might do so again",
}


def note(name: str, rank: int | None = None, host: str = "", **facts: object) -> str:
    """A line of these."""
    return "hvdrun: " + _NOTES[name].format(**_in_words({**facts, "rank": rank, "host": host}))


def error(
    name: str, rank: int | None = None, host: str | None = None, **facts: object
) -> LaunchError:
    """One of these causes. A fact NAME_s can stand in its text as {NAME}, too: as a duration."""
    kind, what, remedy = _CAUSES[name]
    known = _in_words({**facts, "rank": rank, "host": host})
    found: LaunchError = kind(what.format(**known), remedy.format(**known), rank, host)
    return found


def _in_words(facts: dict[str, Any]) -> dict[str, Any]:
    times = [name for name in facts if name.endswith("_s")]
    return facts | {name.removesuffix("_s"): duration(facts[name]) for name in times}


# ---- a rank that has failed


class Failure(NamedTuple):
    """A rank that ended with an error: how, as its keeper reports it, and when."""

    rank: int
    host: str
    ended: str  # 'code 3', 'signal 9', 'oom 9' or 'shm 7 64/64'
    after_s: float
    # MPI had already ended its shim: another failure may be the cause.
    late: bool = False
    at: float | None = None  # in seconds since 1970

    @property
    def exit_code(self) -> int:
        kind, number, *_ = self.ended.split()
        return int(number) if kind == "code" else 128 + int(number)

    def __str__(self) -> str:
        at = "" if self.at is None else time.strftime(" (at %H:%M:%S)", time.localtime(self.at))
        how = in_words(self.ended, self.host)[1]
        if self.ended == "signal 9":
            how += " (kill -9, or a batch system)"
        return f"rank {self.rank} on {self.host} {how} after {duration(self.after_s)}{at}"


def in_words(ended: str, host: str) -> tuple[str, str, str]:
    """The cause, how the rank ended, and the remedy, where there is one."""
    kind, number, *more = ended.split()
    used, there = (size(int(count)) for count in more[0].split("/")) if more else ("", "")
    facts = {"number": number, "host": host, "used": used, "there": there}
    facts["signal"] = "" if kind == "code" else signal_name(int(number))
    word, how, remedy = (text.format(**facts) for text in _ENDS.get(kind, _ENDS["signal"]))
    return word, how, remedy


class FailureReport(NamedTuple):
    """How the job has failed. failure: of the rank that failed first; else hvdrun's own error is
    the cause."""

    cause: str  # as docs/reference/supervision.md lists them
    rank: int | None
    host: str | None
    remedy: str
    failure: Failure | None = None
    evidence: tuple[str, ...] = ()  # the rank's last lines on stderr, or mpirun's
    same: tuple[int, ...] = ()  # the ranks whose last lines are the same
    waited_at: str = ""  # the line of the script from which it has waited for hvdlite last
    notes: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()  # in which ones the ranks were


def of_rank(failure: Failure, **more: Any) -> FailureReport:
    cause, _, remedy = in_words(failure.ended, failure.host)
    return FailureReport(cause, failure.rank, failure.host, remedy, failure, **more)


def of_error(error: LaunchError, evidence: tuple[str, ...] = ()) -> FailureReport:
    evidence = evidence or error.evidence
    return FailureReport(error.word, error.rank, error.host, error.remedy, evidence=evidence)


def lines_of(report: FailureReport, num_proc: int, repeat: bool = True) -> list[str]:
    """The report on a rank. repeat: shows its last lines, as they are not right above on the
    screen."""
    others = {1: "", 2: "; the other rank was ended"}.get(
        num_proc, f"; the other {num_proc - 1} ranks were ended"
    )
    lines = [f"hvdrun: {report.failure}{others}"]
    said = report.evidence
    if said and num_proc > 1:  # a single rank's last lines have just been shown
        many = f" (the same on ranks {spans(report.same)})" if len(report.same) > 1 else ""
        where = ":" if repeat else " are just above"
        lines.append(f"hvdrun: its last lines on stderr{many}{where}")
        lines += [f"    {line}" for line in said if repeat]
    # A traceback knows better.
    if report.waited_at and not any(line.startswith("Traceback ") for line in said):
        lines.append(f"hvdrun: it last waited for hvdlite in {report.waited_at}")
    lines += [f"hvdrun: {report.remedy}"] if report.remedy else []
    return [*lines, *report.notes]


class Verdict(NamedTuple):
    """How a job ended."""

    exit_code: int
    outcome: str = "succeeded"  # or failed, refused, interrupted, preempted; running while it does
    report: FailureReport | None = None
    error: LaunchError | None = None  # raised at the end, if no rank is the cause
    figures: tuple[str, ...] = ()  # what the ranks have measured, in words
    above: tuple[str, ...] = ()
    below: tuple[str, ...] = ()
    num_proc: int = 1
    requeues: bool = False  # the batch scheduler is to be asked to run the job again

    @property
    def culprit(self) -> int | None:
        return self.report.rank if self.report else None

    @property
    def words(self) -> int:
        """How many of the culprit's last lines are shown."""
        return len(self.report.evidence) if self.report and self.report.failure else 0

    def lines(self, repeat: bool = True) -> list[str]:
        """What is shown at the end, before the error, if there is one. repeat: also the last lines
        of the rank that failed; below a table they stand anyway."""
        lines = [*self.figures, *self.above]
        if self.report and self.report.failure:
            lines += lines_of(self.report, self.num_proc, repeat or bool(self.figures))
        return [*lines, *(self.report.operations if self.report else ()), *self.below]


# ---- words that need more than a row


def names(hosts: Sequence[str]) -> str:
    """'b', 'b and c', 'b, c, d and 5 other hosts'."""
    named = list(hosts) if len(hosts) <= NAMED + 1 else list(hosts[:NAMED])
    if len(named) < len(hosts):
        named.append(f"{len(hosts) - NAMED} other hosts")
    return " and ".join(filter(None, [", ".join(named[:-1]), named[-1]]))


def named(ranks: Collection[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(sorted(ranks))}"


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


def not_started(hosts: Iterable[tuple[str, int, str]], limit_s: float) -> LaunchError:
    """`hosts`: name, number of ranks that have not started there, and what is known about it."""
    lines = [
        f"{host}: {lacking} {'rank' if lacking == 1 else 'ranks'} not started"
        + (f": {state}" if state else "")
        for host, lacking, state in hosts
    ]
    found = error(
        "not started", limit_s=limit_s, hosts="\n".join(f"        {line}" for line in lines)
    )
    found.evidence = tuple(lines)
    return found


def misplaced(wrong: Mapping[tuple[str, str], Sequence[int]], starter: str) -> LaunchError:
    """`wrong`: the ranks by their planned and their actual host."""
    found = [
        f"{named(ranks)} on {actual} instead of {planned}"
        for (planned, actual), ranks in list(wrong.items())[:MOST_MISPLACED]
    ]
    found += [f"and more on {len(wrong) - len(found)} other hosts"] * (len(wrong) > len(found))
    return error("misplaced", starter=starter, ranks=", ".join(found))


def host_lost(host: str, how: str, ssh_said: bytes = b"") -> LaunchError:
    said = ssh_said.decode(errors="replace").strip().splitlines()
    return error("host lost", host=host, how=how, said=f" ({said[-1]})" if said else "")


def host_silent(
    host: str, silent_s: float, limit_s: float, others: Sequence[str], ssh_said: bytes
) -> LaunchError:
    """`others`: more hosts that are silent."""
    too = f" (nor has {names(others)})" if others else ""
    how = (
        f"it has given no sign of life for {silent_s:.0f} s{too}, and the limit is {limit_s:g} s"
        " (--host-timeout)"
    )
    return host_lost(host, how, ssh_said)


def gave_up(host: str, silent_s: float, pause_s: float) -> LaunchError:
    """`pause_s`: for how long hvdrun itself did not run before."""
    if pause_s:
        return error("host gave up, paused", host=host, silent_s=silent_s, pause_s=pause_s)
    return error("host gave up", host=host, silent_s=silent_s)


def missing_program(program: str, rank: int, host: str, number: int) -> LaunchError:
    name = "no program" if number in (errno.ENOENT, errno.ENOTDIR) else "no right to run"
    return error(name, rank, host, program=program, why=os.strerror(number))


def unreachable(host: str, errors: bytes, python: str, printed: bytes = b"") -> LaunchError:
    """The connection ended before the host agent's first message. ssh's stderr tells why, or what
    the login shell has printed."""
    text = errors.decode(errors="replace")
    words = last_words(text) or last_words(printed.decode(errors="replace"))
    said = words or "nothing was printed"
    why = trouble(text)
    if why is not OTHER or text.startswith("ssh:"):
        do = why.remedy.format(host=host, login=host)
        return error("not reached", host=host, way=why.way, why=why.cause, said=said, do=do)
    is_missing = re.search("(?i)not found|no such file|exit code 12[67]", text)
    name = "no agent" if python in text or is_missing else "no login"
    return error(name, host=host, said=said, python=python)


def daemon_failed(host: str, status: int, said: bytes) -> LaunchError:
    """MPI's daemon ended before it started a rank; mpirun may wait for it for ever."""
    lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
    words = "; ".join(lines[-3:]) or "it printed nothing"
    missing = "not found|No such file|cannot open shared object|Permission denied"
    do = (
        "every host needs the same MPI at the same path"
        if status in (126, 127) or re.search(missing, words)
        else "`hvdrun --check` tests what it needs: a folder for temporary files with room, and TCP"
        " to the host of hvdrun"
    )
    return error("daemon failed", host=host, status=status, words=words, do=do)
