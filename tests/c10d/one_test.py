"""Runs one test in a process group of its own, which ends with it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import unittest
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

PASSED, FAILED, SKIPPED, HUNG = "passed", "failed", "skipped", "hung"
STACKS_S = 0.5  # for each of a hanging test's processes to print its stacks
LAST_LINES = 200  # of a failed test's output
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Outcome:
    test: str
    status: str
    seconds: float
    text: str = ""  # why it was skipped, or what it printed before it failed


class Running:
    """A test that has been started; `poll` asks whether it has ended."""

    def __init__(self, case: unittest.TestCase, limit_s: float, folder: Path) -> None:
        self.name = case.id().rpartition(".")[2]
        self.begin = time.monotonic()
        self._deadline = self.begin + limit_s
        self._limit_s = limit_s
        self._folder = folder / self.name
        self._folder.mkdir()
        self._log, self._result = self._folder / "log", self._folder / "result"
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            self._be_the_test(case)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(self._pid, self._pid)  # by whichever of the two is first

    def _be_the_test(self, case: unittest.TestCase) -> None:
        """In the new process, which ends here: it starts the ranks, and joins them."""
        try:
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.setpgid(0, 0)
            log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ["TMPDIR"] = tempfile.tempdir = str(self._folder)
            found = unittest.TestResult()
            unittest.TestSuite([case]).run(found)
            bad = [text for _, text in (*found.errors, *found.failures)]
            skipped = [reason for _, reason in found.skipped]
            status = FAILED if bad else SKIPPED if skipped else PASSED
            self._result.write_text(json.dumps({"status": status, "texts": bad or skipped}))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def poll(self) -> Outcome | None:
        """Not collective: the session calls it until the outcome is there."""
        ended, _ = os.waitpid(self._pid, os.WNOHANG)
        if ended:
            return self._end(self._outcome())
        if time.monotonic() < self._deadline:
            return None
        self._ask_for_stacks()
        self._signal(signal.SIGKILL)
        os.waitpid(self._pid, 0)
        text = f"no end after {self._limit_s:g} s\n{self._output()}"
        return self._end((HUNG, text))

    def _ask_for_stacks(self) -> None:
        """Every process prints its stacks (faulthandler), in turn: they share a file."""
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(pid) == self._pid:
                    os.kill(pid, signal.SIGUSR1)
                    time.sleep(STACKS_S)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._remove()

    def _outcome(self) -> tuple[str, str]:
        try:
            result = json.loads(self._result.read_text())
        except (OSError, ValueError):
            return FAILED, f"the test's process ended without a result\n{self._output()}"
        text = "\n".join(result["texts"])
        return result["status"], text if result["status"] == SKIPPED else self._with_output(text)

    def _with_output(self, text: str) -> str:
        return f"{text}\n{self._output()}" if text else ""

    def _output(self) -> str:
        with contextlib.suppress(OSError):
            return "\n".join(self._log.read_text(errors="replace").splitlines()[-LAST_LINES:])
        return ""

    def _end(self, found: tuple[str, str]) -> Outcome:
        status, text = found
        if self._signal(signal.SIGKILL) and status != HUNG:
            status, text = FAILED, f"it left processes behind\n{text or self._output()}"
        self._remove()
        return Outcome(self.name, status, round(time.monotonic() - self.begin, 2), text)

    def _signal(self, number: int) -> bool:
        """Whether a process was there to get it."""
        try:
            os.killpg(self._pid, number)
        except ProcessLookupError:
            return False
        return True

    def _remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def as_line(outcome: Outcome) -> str:
    return json.dumps(asdict(outcome))
