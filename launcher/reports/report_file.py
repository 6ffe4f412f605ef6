"""`hvdrun --report-file FILE`: how the job went, for programs (docs/reference/supervision.md).

It is written once the options are known (the job runs) and at the end, whatever the end is.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from typing import Any

from hvdrun.errors import LaunchError, UsageError
from hvdrun.output.metrics_file import reason, write
from hvdrun.plan.command import Command
from hvdrun.reports.failure_report import FailureReport, Verdict, of_error, signal_name

# Grows if a field changes its meaning or is removed, not if one is added.
FORMAT = 1


class ReportFile:
    """What is known of the job so far. No path: nothing is written."""

    def __init__(self) -> None:
        self.path = ""
        self.command: list[str] = []
        self.begun_at = time.time()
        self.job: Command | None = None
        self.attempts = 0
        self.verdict = Verdict(0, "running")
        self.figures = ""  # what the ranks have measured, in JSON

    def begin(self) -> None:
        """Raises UsageError if the file can't be written."""
        try:
            self._write(None)
        except OSError as error:
            path, self.path = self.path, ""
            raise UsageError(f"--report-file {path}: {reason(error)}") from error

    def attempt(self, number: int) -> None:
        """mpirun is about to be started."""
        self.attempts = number
        with contextlib.suppress(OSError):  # it is said at the end
            self._write(None)

    def fail(self, error: BaseException) -> None:
        """hvdrun itself does."""
        if self.verdict.error is not error:
            outcome = "failed" if self.attempts else "refused"
            report = of_error(error) if isinstance(error, LaunchError) else _internal(error)
            self.verdict = Verdict(1, outcome, report, below=(f"hvdrun: {error}",))

    def interrupted(self, by: BaseException | None) -> None:
        """By a signal while no rank ran: see `__main__.interrupt`."""
        self.verdict = Verdict(0, "interrupted")
        self.end(128 + (by.args[0] if by and by.args else signal.SIGINT))

    def end(self, code: int) -> int:
        """Writes how it ended; returns the code."""
        if self.verdict.outcome == "running":
            self.verdict = Verdict(code)
        try:
            self._write(code)
        except OSError as error:
            words = f"hvdrun: --report-file {self.path}: {reason(error)}"
            with contextlib.suppress(OSError):
                print(words, file=sys.stderr, flush=True)
        return code

    def _write(self, code: int | None) -> None:
        if self.path:
            write(self.path, _text(self._document(code)), mode=None)

    def _document(self, code: int | None) -> dict[str, Any]:
        from importlib.metadata import version

        now, job, report = time.time(), self.job, self.verdict.report
        hosts = [share.host.name for share in job.shares] if job else []
        return {
            "format": FORMAT,
            "hvdlite": version("hvdlite"),
            "outcome": self.verdict.outcome,
            "exit_code": code,
            "command": self.command,
            "num_proc": job and job.num_proc,
            "hosts": [{"name": name, "ranks": [*job.ranks_of(name)]} for name in hosts if job],
            "begin": _iso(self.begun_at),
            "end": None if code is None else _iso(now),
            "duration_s": round(now - self.begun_at, 3),
            "attempts": self.attempts,
            "failure": report and _failure(report) | {"message": self._message()},
            "metrics": json.loads(self.figures) if self.figures else None,
        }

    def _message(self) -> str:
        error = self.verdict.error
        return "\n".join([*self.verdict.lines(), *([f"hvdrun: {error}"] if error else [])])


def _text(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _internal(error: BaseException) -> FailureReport:
    from traceback import format_exception

    lines = "".join(format_exception(error)).splitlines()
    return FailureReport("internal-error", None, None, "", evidence=tuple(lines))


def _failure(report: FailureReport) -> dict[str, Any]:
    failure = report.failure
    kind, number, *_ = failure.ended.split() if failure else ("", 0)
    is_code = kind == "code"
    return {
        "cause": report.cause,
        "rank": report.rank,
        "host": report.host,
        "exit_code": int(number) if is_code else None,
        "signal": signal_name(int(number)).split(" (")[0] if failure and not is_code else None,
        "at": _iso(failure.at) if failure and failure.at else None,
        "after_s": round(failure.after_s, 3) if failure else None,
        "evidence": report.evidence,
        "same_on": report.same,
        "waited_at": report.waited_at or None,
        "operations": [line.removeprefix("hvdrun: ") for line in report.operations],
        "remedy": report.remedy or None,
    }


def _iso(seconds: float) -> str:
    from datetime import datetime, timezone

    at = datetime.fromtimestamp(seconds, timezone.utc)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
