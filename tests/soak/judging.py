"""Whether a job of the soak went as its fault should make it go. Pure.

Every line that hvdrun or hvdlite prints is looked at. A sentence that accuses a rank or a host
names the one that has the fault. A job without a fault, or with one that passes before anybody has
to notice it, says nothing.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.soak.drawing import Job
from tests.soak.rank import EXIT_CODE, RAISED
from tests.soak.running import Played

CODES = {
    "SIGKILL": 128 + signal.SIGKILL,
    "SIGSEGV": 128 + signal.SIGSEGV,
    "keeper killed": 128 + signal.SIGKILL,
    "exit": EXIT_CODE,
    "exception": 1,
    "stall for ever": 1,
    "flipped bit": 1,
    "NaN": 1,
    "Ctrl-C": 128 + signal.SIGINT,
    "TERM": 128 + signal.SIGTERM,
    "hvdrun killed": 128 + signal.SIGKILL,
    "agent killed": 72,
    "link cut": 72,
}
# A rank that ended, in the words of hvdrun's report.
ENDED = {
    "SIGKILL": "was ended by SIGKILL",
    "SIGSEGV": "was ended by SIGSEGV",
    "keeper killed": "was ended by SIGKILL",
    "exit": f"ended with exit code {EXIT_CODE}",
    "exception": "ended with exit code 1",
}
ACCUSED_RANK = re.compile(r"^hvdrun: rank (\d+) on (\S+) ((?:was ended|ended|had ended).*)")
ACCUSED_HOST = re.compile(r"^hvdrun: (server\d+) (?:is lost|has ended its ranks)")
QUIET_HOST = re.compile(r"^hvdrun: (.*) (?:has|have) given no sign of life")
STALL = re.compile(
    r"^(?:\[[\d, ranks-]*\] )?hvdlite: .*(?:has waited|still waits|has made no progress)"
)
STALLED_RANK = re.compile(r"rank (\d+) on (\S+) \((?:which|of)")
# Of a rank that has not come on, as it waits for another one: the operation in which it does.
WAITS_ELSEWHERE = re.compile(r"rank \d+ on \S+ \(which has been in (\w+ '[^']*') for [^)]*\),? ?")
STALLED_HOST = re.compile(r" (server\d+), which does not answer")
NOT_CALLED = re.compile(r"allreduce 'round (\d+)'(?: \(no\. \d+\))?, which ranks? ([\d,-]+) ha")
SLOW_RANK = re.compile(r"^hvdrun: ranks? ([\d,-]+) on \S+.* arrives? last in")
# What hvdrun says of a job that works.
SUMMARY = re.compile(
    r"^hvdrun: (\d+ steps|one step|no step|where the time of a step goes|no rank is steadily late"
    r"|which rank is late is not known"
    r"|ranks? [\d,-]+ on .* (arrives?|costs the others|is throttled|are throttled)"
    r"|the link between server\d and server\d gives at least)"  # a fact, no accusation
)
TABLE = re.compile(r"^    +(rank +host|\d+  (server|localhost))")
NODE = re.compile(r"^hvdrun: (this is node \d|waiting for nodes? |all nodes are )")
BACK = re.compile(r"^hvdrun: server\d+(?: and server\d+)? (?:is|are) back after")
PAUSED = "hvdrun: hvdrun itself did not run for"
# hvdrun tells how a start goes on that takes long: ranks come late on a busy machine.
STARTING = re.compile(
    r"^hvdrun: (ranks? [\d,-]+ waits? in hvd.init\(\) for|all ranks are in hvd.init\(\))"
)
CORES = re.compile(r"^hvdrun: \d+ processes on \S+, which has \d+ cores?: they share them$")
# Preflight on a machine that has much else to do.
SLOW_HOST = re.compile(r"^hvdrun: waiting for an answer from server\d")
LISTENER = "listener thread failed to start"  # Open MPI's, which hvdrun starts again
PASSES = ("none", "pause", "link down", "hvdrun paused")


@dataclass
class Judgement:
    """wrong: what should not be so, with a word in front for the sum. named: the verdicts that
    named the right rank or host. slow: ranks that --summary calls late, on a machine that has much
    else to do."""

    wrong: list[str] = field(default_factory=list)
    named: list[str] = field(default_factory=list)
    slow: int = 0


def spans(text: str) -> set[int]:
    """'0-1,3' as {0, 1, 3}."""
    found: set[int] = set()
    for part in text.strip(",").split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def judge(job: Job, played: Played, timeline: Path | None = None) -> Judgement:
    found = Judgement()
    if played.late:
        found.wrong.append(f"late: {played.late.splitlines()[0]}")
    found.wrong += [f"left: {thing}" for thing in played.left]
    found.wrong += _wrong_results(job, played)
    if not played.late:
        found.wrong += _wrong_codes(job, played)
    lines = played.errors.splitlines()
    _accusations(job, lines, found)
    _stalls(job, lines, found)
    _operations(job, played, found)
    _texts(job, played, found)
    if job.fault.kind in PASSES:
        found.wrong += [f"alarm: {line}" for line in _alarms(job, lines)]
        found.wrong += [
            f"alarm: {line}"
            for line in (*played.out.splitlines(), *played.others.splitlines())
            if not re.fullmatch(r"(\[\d+\] )?right", line) and not _is_calm(job, line)
        ]
    if timeline is not None:
        found.wrong += _wrong_timeline(timeline)
    found.slow = sum(bool(SLOW_RANK.search(line)) for line in lines)
    return found


def _wrong_results(job: Job, played: Played) -> Iterator[str]:
    text = played.out + played.errors
    if "WRONG RESULT" in text:
        yield "result: " + text[text.index("WRONG RESULT") :].splitlines()[0]
    rights = len(re.findall(r"^(?:\[\d+\] )?right$", played.out, re.MULTILINE))
    if CODES.get(job.fault.kind, 0) == 0 and rights != job.workers:
        yield f"result: {rights} of {job.workers} workers say that all was right"


def _wrong_codes(job: Job, played: Played) -> Iterator[str]:
    wanted = CODES.get(job.fault.kind, 0)
    # An hvdrun that was killed leaves no code to the others, who have lost node 0.
    codes = played.codes[:1] if job.fault.kind == "hvdrun killed" else played.codes
    if any(code not in (wanted, 128 - wanted) for code in codes):
        yield f"code: {played.codes}, expected {wanted}"


def _names_of(job: Job, rank: int) -> set[str]:
    """What the rank's host is called in reports: the only host is hvdrun's own."""
    return {job.host_of(rank), *(["localhost"] if len(job.layout) == 1 else [])}


def _accusations(job: Job, lines: Iterable[str], found: Judgement) -> None:
    fault, names = job.fault, []
    for line in lines:
        if match := ACCUSED_RANK.match(line):
            rank, host, how = int(match[1]), match[2], match[3]
            names.append(how)
            is_right = rank == fault.victim and host in _names_of(job, rank)
            if fault.kind in ENDED and is_right and how.startswith(ENDED[fault.kind]):
                found.named.append(line)
            elif fault.kind not in ("stall for ever", "flipped bit", "NaN"):
                # There, a rank that heard of the fault fails of it; its last lines have the cause.
                found.wrong.append(f"accused: {line}")
        elif match := ACCUSED_HOST.match(line):
            if fault.kind in ("agent killed", "link cut") and match[1] == f"server{fault.host + 1}":
                found.named.append(line)
            else:
                found.wrong.append(f"accused: {line}")
        elif match := QUIET_HOST.match(line):
            is_cut = fault.kind in ("link down", "link cut")
            if not is_cut or match[1] != f"server{fault.host + 1}":
                found.wrong.append(f"accused: {line}")
    if fault.kind in (*ENDED, "agent killed", "link cut") and not found.named:
        found.wrong.append(
            f"unnamed: hvdrun does not say {ENDED.get(fault.kind, 'that the host is lost')}"
        )


def _stalls(job: Job, lines: Iterable[str], found: Judgement) -> None:
    """The reports of the stall check name the rank that is stopped, or its host where nobody else
    can speak for it."""
    fault, named = job.fault, 0
    stalls = [line for line in lines if STALL.match(line) or "all operations fail now" in line]
    # A rank that is still in an operation is not accused if its own report says who it waits for.
    victim = f"for rank {fault.victim} on "
    explained = [line for line in stalls if victim in WAITS_ELSEWHERE.sub("", line)]
    for reported in stalls:
        line = WAITS_ELSEWHERE.sub(
            lambda match: "" if any(match[1] in other for other in explained) else match[0],
            reported,
        )
        ranks = {int(match[1]) for match in STALLED_RANK.finditer(line)}
        hosts = set(STALLED_HOST.findall(line))
        if fault.kind not in ("stall", "stall for ever"):
            found.wrong.append(f"accused: {line}")
        elif line != reported and not ranks and not hosts:
            continue
        elif ranks <= {fault.victim} and hosts <= _names_of(job, fault.victim) and (ranks or hosts):
            named += 1
            found.named.append(line)
        else:
            found.wrong.append(f"accused: {line}")
    if fault.kind in ("stall", "stall for ever") and not named:
        found.wrong.append("unnamed: no report of the stall check names the stopped rank")


def _operations(job: Job, played: Played, found: Judgement) -> None:
    """A rank of which it is said that it has not called an operation had not ended it."""
    for match in NOT_CALLED.finditer(played.errors):
        # Round n + 1 is noted when the first operation of round n has ended.
        ended = [rank for rank in spans(match[2]) if played.rounds.get(rank, 0) > int(match[1])]
        if ended and not job.servers:
            found.wrong.append(f"accused: {match[0]}: ranks {ended} had ended it")
        else:
            found.named.append(match[0])


def _texts(job: Job, played: Played, found: Judgement) -> None:
    """What the errors of ranks must say."""
    fault = job.fault
    if fault.kind == "flipped bit":
        told = re.search(r"DifferenceError: .*", played.errors)
        if told and re.search(rf"\brank {fault.victim}\b", told[0]):
            found.named.append(told[0])
        else:
            found.wrong.append(f"unnamed: {told[0] if told else 'no DifferenceError'}")
    elif fault.kind == "NaN":
        told = re.search(r"NumericsError: .*", played.errors)
        if told and re.findall(r"\brank (\d+)\b", told[0])[:1] == [str(fault.victim)]:
            found.named.append(told[0])
        else:
            found.wrong.append(f"unnamed: {told[0] if told else 'no NumericsError'}")
    elif fault.kind == "exception" and RAISED not in played.errors:
        found.wrong.append("unnamed: the exception was not shown")


def _is_calm(job: Job, line: str) -> bool:
    """hvdrun may say this of a job that works."""
    kind = job.fault.kind
    if "--summary" in job.options and (SUMMARY.match(line) or TABLE.match(line)):
        return True
    if job.start == "rendezvous" and NODE.match(line):
        return True
    if kind == "link down" and (QUIET_HOST.match(line) or BACK.match(line)):
        return True
    if kind == "hvdrun paused" and line.startswith(PAUSED):
        return True
    return LISTENER in line or bool(
        CORES.match(line) or SLOW_HOST.match(line) or STARTING.match(line)
    )


def _alarms(job: Job, lines: Iterable[str]) -> Iterator[str]:
    starts = False
    for line in lines:
        # What ranks do while others wait for them in hvd.init().
        starts = STARTING.match(line) is not None or (starts and line.startswith("    rank "))
        if line and not starts and not _is_calm(job, line):
            yield line


def _wrong_timeline(path: Path) -> Iterator[str]:
    try:
        events = json.loads(path.read_text())
    except ValueError as error:
        yield f"timeline: {error}"
        return
    if not events:
        yield "timeline: it is empty"
