"""Runs pytest twice at the same time: the tests on worlds of ranks, and all others.

    python -m tests.harness.side_by_side PYTEST_ARGUMENTS

Tests often wait: for processes to start, for time limits, for messages. Two sessions use this time,
and each takes about half of it; some jobs of hvdrun are with the worlds for that. Each has at most
one world up, and one rig of several hosts: of `make test`, only the second one needs a rig.

The first session writes to the terminal; the output of the second one follows, and at the end the
tests that failed in each. Each session is in a process group of its own, so that Ctrl-C reaches
only this process, which ends both in good order.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

PARTS = ("worlds", "others")
STOP_AT_A_FAILURE = re.compile(r"-[qsvl]*x[qsvl]*|--exitfirst|--maxfail=1")
# One session does these: it shows each test once, or has the terminal.
ALONE = {"--collect-only", "--co", "--pdb", "--trace", "--help", "-h", "--version"}
FINE = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
ENDS: dict[int, str] = {
    pytest.ExitCode.OK: "passed",
    pytest.ExitCode.NO_TESTS_COLLECTED: "no test selected",
}

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def in_a_group_of_its_own() -> None:
    """Between fork and exec. If this process is killed, the session still ends in good order."""
    os.setpgid(0, 0)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def start(
    part: str, failed: Path, arguments: Sequence[str], output: int | None
) -> subprocess.Popen[bytes]:
    """One session, which writes the names of the tests that fail into the file `failed`.

    Its cache is its own: it remembers which tests have failed. With --lf a session without a failed
    test runs none, and not all."""
    options = ["--part", part, "--failed-to", str(failed), "--last-failed-no-failures=none"]
    options += ["-o", f"cache_dir=.pytest_cache/{part}"]
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        preexec_fn=in_a_group_of_its_own,
    )


def run(arguments: Sequence[str]) -> int:
    """The exit code: 0 if all tests of both sessions have passed."""
    if ALONE & set(arguments):
        os.execv(sys.executable, [sys.executable, "-m", "pytest", *arguments])
    with tempfile.TemporaryDirectory() as folder:
        failed = [Path(folder, part) for part in PARTS]
        codes = run_both(arguments, failed, Path(folder, "log"))
        names = [file.read_text().splitlines() if file.exists() else [] for file in failed]
    return verdict(codes, names)


def run_both(arguments: Sequence[str], failed: Sequence[Path], log_path: Path) -> list[int]:
    with log_path.open("w+b") as log:
        print("worlds of ranks; the output of all other tests follows", flush=True)
        sessions = [
            start("worlds", failed[0], arguments, None),
            start("others", failed[1], arguments, log.fileno()),
        ]

        def end(*_: object) -> None:
            for session in sessions:
                with contextlib.suppress(ProcessLookupError):
                    session.terminate()

        signal.signal(signal.SIGINT, end)
        signal.signal(signal.SIGTERM, end)
        stops = any(STOP_AT_A_FAILURE.fullmatch(argument) for argument in arguments)
        while any(session.poll() is None for session in sessions):
            time.sleep(0.1)
            if stops and any(session.returncode not in (None, *FINE) for session in sessions):
                stops = False
                end()
        log.seek(0)
        sys.stdout.flush()
        sys.stdout.buffer.write(log.read())
        sys.stdout.flush()
    return [session.returncode for session in sessions]


def verdict(codes: Sequence[int], failed: Sequence[Sequence[str]] = ((), ())) -> int:
    """A selection may have no test in one of the sessions.

    >>> verdict([0, 0]), verdict([5, 0]), verdict([0, 1]), verdict([5, 5])
    (0, 0, 1, 5)
    """
    bad = [code for code in codes if code not in FINE]
    if bad:
        for part, code, names in zip(PARTS, codes, failed, strict=True):
            print(f"{part}: {ENDS.get(code, f'exit code {code}')}", *names, sep="\n    ")
        return bad[0] if bad[0] > 0 else 128 - bad[0]
    return min(codes)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
