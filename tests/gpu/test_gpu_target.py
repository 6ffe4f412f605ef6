"""`make test-gpu` where it can't run: one line that says why, and an exit code that says so."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.harness.worlds import ROOT

PROGRAMS = ROOT / "tests" / "gpu" / "with_gpu"


without_gpus = pytest.mark.skipif(torch.cuda.is_available(), reason="it would run")


@without_gpus
def test_without_a_gpu_it_says_what_is_missing_and_fails():
    done = subprocess.run(
        ["make", "--silent", "test-gpu", f"PYTHON={sys.executable}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode
    said = [line for line in done.stderr.splitlines() if not re.match(r"make(\[\d+\])?:", line)]
    (line,) = said
    assert line.startswith("make test-gpu does not run here: torch ")
    assert sys.executable in line


@without_gpus
def test_an_interpreter_without_torch_is_named(tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{Path(sys.base_prefix) / "bin" / "python3"}" -I "$@"\n')
    bare.chmod(0o755)
    done = subprocess.run(
        [bare, PROGRAMS / "run.py"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "does not run here" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_pytest_collects_none_of_its_programs():
    assert not [path.name for path in PROGRAMS.glob("*.py") if path.name.startswith("test_")]
