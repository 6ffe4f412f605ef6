"""The script in the README, which is also that of the quick start, learns."""

import re

import pytest

from tests.harness.programs import run_program
from tests.harness.worlds import ROOT, python_of

README = (ROOT / "README.md").read_text()
QUICK_START = (ROOT / "docs/quickstart.md").read_text()


def script_of(page):
    (script,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return script


def test_the_quick_start_has_the_same_script():
    assert script_of(QUICK_START) == script_of(README)


@pytest.mark.wide_in("mpich")
def test_the_script_in_the_readme_learns_on_two_ranks(mpi, tmp_path):
    script = script_of(README)
    (tmp_path / "train.py").write_text(script)
    python = python_of(mpi)
    command = [python.with_name("hvdrun"), "-np", "2", python, tmp_path / "train.py"]
    run = run_program(command, limit_s=120).of_rank(0)
    assert run.code == 0, run
    loss = float(run.find(r"^loss (\S+), averaged over 2 ranks$"))
    assert loss < 1e-3
