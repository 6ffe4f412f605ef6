"""Runs a program as its user does, and gives up on it after a while."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness.worlds import ROOT, end_tree


@dataclass(frozen=True)
class Finished:
    """A program that has ended, and what it wrote."""

    code: int
    stdout: str
    stderr: str

    def find(self, pattern: str) -> str:
        """The text that the only group of the pattern matches on a line of stdout."""
        match = re.search(pattern, self.stdout, re.MULTILINE)
        assert match, f"no line like {pattern}:\n{self}"
        return match[1]

    def of_rank(self, rank: int) -> Finished:
        """The lines that one rank printed under hvdrun, which tags each line with the rank.

        stderr stays as it is: progress bars and hvdrun's own messages are there.
        """
        tag = f"[{rank}] "
        lines = [line + " " for line in self.stdout.splitlines()]  # an empty one has its tag only
        kept = [line.removeprefix(tag).rstrip() for line in lines if line.startswith(tag)]
        return Finished(self.code, "".join(f"{line}\n" for line in kept), self.stderr)

    def __repr__(self) -> str:
        return f"exit code {self.code}\n-- stdout\n{self.stdout}\n-- stderr\n{self.stderr}"


def run_program(command: Sequence[str | Path], limit_s: float, cwd: str | Path = ROOT) -> Finished:
    """Runs it, by default in the repository's root. At the limit it ends all its processes and
    fails the test.

    Its output goes through pipes: a child that outlives it holds them open, and so fails the test.
    """
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=limit_s)
        ended = True
    except subprocess.TimeoutExpired:
        end_tree(process)
        stdout, stderr = process.communicate()
        ended = False
    finished = Finished(
        process.returncode, stdout.decode(errors="replace"), stderr.decode(errors="replace")
    )
    if not ended:
        pytest.fail(f"no end after {limit_s:g} s: {command}\n{finished}")
    return finished
